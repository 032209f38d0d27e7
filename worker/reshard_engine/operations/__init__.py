"""Operations: everything that a user can ask the engine for, one module each."""
