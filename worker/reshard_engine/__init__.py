"""The engine, as a library: formats, plan, execution, storage and operations. It needs no service."""
