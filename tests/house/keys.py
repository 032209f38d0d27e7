"""Keys that sign statements about checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

PEM, PKCS8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8


def key_pair(place: Path, name: str, key: Any = None, passphrase: bytes | None = None) -> tuple[Path, Path]:
    """Files of a private key and of its public key."""
    key = key or ed25519.Ed25519PrivateKey.generate()
    hidden = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    private, public = place / f"{name}.key", place / f"{name}.pub"
    private.write_bytes(key.private_bytes(PEM, PKCS8, hidden))
    public.write_bytes(key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public
