"""S3 listings, page by page. Pages must follow in key order and must end; any other listing is refused.

Source: Amazon S3 API reference, ListObjectsV2 (keys in UTF-8 binary order, at most 1,000 a page,
`IsTruncated` always present, `NextContinuationToken` where it is true).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from reshard.errors import StorageError, printable

MAX_PAGES = 20_000
"""Most pages of one listing: 20 million objects."""


def pages(client: Any, bucket: str, prefix: str, *, delimiter: str = "") -> Iterator[dict[str, Any]]:
    """Each page of the listing of a prefix, as botocore parses it.

    Raises:
        StorageError: `storage.protocol` for a reply that is no listing, and for pages out of order or without end.
    """
    asked: dict[str, str] = {}
    last = b""
    for number in range(1, MAX_PAGES + 1):
        page: dict[str, Any] = client.list_objects_v2(Bucket=bucket, Prefix=prefix, Delimiter=delimiter, **asked)
        if "IsTruncated" not in page:
            raise _against_the_protocol(bucket, "the reply is no listing")
        if any("Key" not in entry or "Size" not in entry for entry in page.get("Contents", ())):
            raise _against_the_protocol(bucket, "the listing names an object without a key or a size")
        names = [str(entry["Key"]).encode() for entry in page.get("Contents", ())]
        names += [str(entry["Prefix"]).encode() for entry in page.get("CommonPrefixes", ())]
        if number > 1 and names and min(names) <= last:
            raise _against_the_protocol(bucket, f"page {number} of the listing is out of order")
        yield page
        if not page["IsTruncated"]:
            return
        following = {"ContinuationToken": str(page.get("NextContinuationToken", ""))}
        if following in (asked, {"ContinuationToken": ""}):
            raise _against_the_protocol(bucket, f"the listing does not end ({number} pages)")
        asked, last = following, max([last, *names])
    raise _against_the_protocol(bucket, f"the listing does not end ({MAX_PAGES} pages)")


def _against_the_protocol(bucket: str, text: str) -> StorageError:
    return StorageError("storage.protocol", f"s3://{printable(bucket)}: {text}")
