"""Attention backends that can verify a tree. Naming one imports no backend."""

BACKEND_NAME = "dflash_torch"
