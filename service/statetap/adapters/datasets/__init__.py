"""The port `Datasets`: NDJSON in, checked and tokenised in a process pool, kept as one Arrow file a dataset.

A body passes through `lines` (bytes to batches of whole lines), then in a pool process through `encoding`, which reads each
line (`samples`, `messages`), tokenises it (`tokenizer`, `chat`) and returns a record batch, and last into `arrow_file`. `intake`
drives one body, `arrow` holds what there is.
"""
