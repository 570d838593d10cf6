"""The embedded worker: SGLang's HTTP interface over a Hugging Face causal LM, for machines without a GPU, and for tests.

It behaves as SGLang 0.5.23 does wherever that shows in dumps or answers: warm-up, health passes, chunked prefill, decode
passes, the prefix cache. It stands apart from the service: of ours it knows the dump format (`statetap_sglang`) and nothing else.

`cli` the command line, `options` what it decides, `server` a worker's life, `http` and `requests` the interface, `scheduler`
the passes, `prefix_cache` what a pass need not do again, `model` and `capture` the forward pass, `outlets` where dumps go.
"""
