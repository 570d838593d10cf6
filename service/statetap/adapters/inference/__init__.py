"""The port `InferenceClient`: one SGLang server over HTTP."""
