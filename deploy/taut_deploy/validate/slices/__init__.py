"""What breaks first under compression: JSON, tool calls, long prompts, code, languages, ends."""
