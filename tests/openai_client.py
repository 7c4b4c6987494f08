"""Asks a server with OpenAI's own client, which is part of the environment of vLLM: PYTHON openai_client.py BASE_URL [MODEL]."""

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1], api_key="none")
model = sys.argv[2] if len(sys.argv) > 2 else client.models.list().data[0].id
question = [{"role": "user", "content": "What is 15 + 27?"}]
reply = client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=64)
print(reply.choices[0].message.content)
