"""Operations: one folder each, an ``api`` with the dispatch and one file a backend."""
