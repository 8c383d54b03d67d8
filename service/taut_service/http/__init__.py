"""The client's side: connections, bodies, headers, answers and errors as OpenAI shapes them."""
