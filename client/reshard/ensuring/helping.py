"""Helps the process that converts: another node of the same launch takes a part of the work while it waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from contextlib import suppress

from reshard.ensuring.converters import Converter, LocalConverter
from reshard.ensuring.election import Election
from reshard.ensuring.local_checkpoints import writing
from reshard.ensuring.records import Invitation, Records
from reshard.ensuring.together import Sharing
from reshard.ensuring.world import Layout
from reshard.errors import ReshardError
from reshard.models import ConvertRequest

_LOOK_S = 0.5
"""Seconds between two looks of a helper at its invitation."""


class Helper:
    """One process that waits for a key, and helps once with each conversion that it is invited to.

    Args:
        records: The records with the invitation.
        key: The key that this process waits for.
        sharing: The rule by which processes convert together.
        requests: Makes the requests of a conversion from the save directory and the layout of its result.
    """

    def __init__(
        self,
        records: Records,
        key: str,
        sharing: Sharing,
        requests: Callable[[str, Layout], list[ConvertRequest]],
    ) -> None:
        self._records, self._key, self._sharing, self._requests = records, key, sharing, requests
        self._election = Election(records.helper_claim(key, sharing.launch.node))
        self._helped: set[str] = set()

    def help(self, maker: Converter, watched: Set[str]) -> bool:
        """Convert together with the owner of a claim, if it asks for that and no process of this node helps it yet.

        True if this process helped. Errors are those of the owner, too, which tells them to all that wait.
        """
        invitation = self._records.invitation(self._key)
        if invitation is None or invitation.nonce not in watched or invitation.nonce in self._helped:
            return False
        work = self._sharing.helps(invitation.node)
        if work is None or not isinstance(maker, LocalConverter):
            return False
        with writing(self._records.folder):
            claim = self._election.claim()
        if claim is None:
            return False
        self._helped.add(invitation.nonce)
        target, watch = self._records.absolute(invitation.path), _Watch(self._records, self._key, invitation)
        with claim, suppress(ReshardError):
            for request in self._requests(target, invitation.layout):
                maker.help(request, work, watch.ended)
        return True


class _Watch:
    """Tells a helper that the conversion has ended: its invitation is gone, or is for another one."""

    def __init__(self, records: Records, key: str, invitation: Invitation) -> None:
        self._records, self._key, self._invitation = records, key, invitation
        self._looked_at = time.monotonic()
        self._ended = False

    def ended(self) -> bool:
        """True if there is nothing to help with. Asked between units; looks once in a while."""
        now = time.monotonic()
        if not self._ended and now - self._looked_at > _LOOK_S:
            self._looked_at = now
            self._ended = not self._invitation.same_work(self._records.invitation(self._key))
        return self._ended
