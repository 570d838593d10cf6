"""`statetap doctor`: examines workers before a job uses them. It sends a few prompts, and stores nothing."""
