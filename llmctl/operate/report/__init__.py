"""The page of ``llmctl report``: gather -> tables, charts, timeline -> page. Only ``gather`` does I/O."""
