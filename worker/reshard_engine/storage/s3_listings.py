"""What a page of a listing must be: progress in key order, to an end. A store that says otherwise is not believed.

Source: Amazon S3 API reference, ListObjectsV2 (keys in UTF-8 binary order, at most 1,000 a page,
`IsTruncated` always present); botocore 1.43 events (`provide-client-params`, `after-call`, one context a request).
"""

# botocore carries no type information.
from __future__ import annotations

import threading
from typing import Any

from reshard.errors import StorageError, printable

MAX_PAGES = 20_000
"""Of one listing: 20 million objects."""
_ASKED = "reshard_asked"


class ListingGuard:
    """Watches every ListObjectsV2 of a client."""

    def __init__(self) -> None:
        """Nothing was listed yet."""
        self._lock = threading.Lock()
        self._pages: dict[str, tuple[int, bytes]] = {}
        """By the token that the next page will be asked with: pages so far, and the last name on them."""

    def watch(self, client: Any) -> None:
        """Look at each page before anyone else does."""
        client.meta.events.register("provide-client-params.s3.ListObjectsV2", self._asked)
        client.meta.events.register("after-call.s3.ListObjectsV2", self._answered)

    def _asked(self, params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
        context[_ASKED] = params.get("ContinuationToken")

    def _answered(self, http_response: Any, parsed: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
        if http_response.status_code != 200:
            return
        bucket, asked, following = str(parsed.get("Name", "")), context.get(_ASKED), parsed.get("NextContinuationToken")
        if "IsTruncated" not in parsed:
            raise _against_the_protocol(bucket, "the reply is no listing")
        names = [str(entry["Key"]).encode() for entry in parsed.get("Contents", ())]
        names += [str(entry["Prefix"]).encode() for entry in parsed.get("CommonPrefixes", ())]
        with self._lock:
            count, last = self._pages.pop(str(asked), (0, b"")) if asked else (0, b"")
            if parsed["IsTruncated"] and following:
                if following == asked or count >= MAX_PAGES:
                    raise _against_the_protocol(bucket, f"the listing does not end ({count + 1} pages)")
                self._pages[str(following)] = (count + 1, max([last, *names]))
        if count and names and min(names) <= last:
            raise _against_the_protocol(bucket, f"page {count + 1} of the listing goes back")


def _against_the_protocol(bucket: str, text: str) -> StorageError:
    return StorageError("storage.protocol", f"s3://{printable(bucket)}: {text}")
