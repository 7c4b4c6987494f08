"""`python -P -m grpo_tasks.data.serve_spans FD`: the child process of side_by_side.py. Reads spans of one file."""

import json
import os
import sys
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow as pa

from grpo_tasks.data.jsonl import Span, read_span
from grpo_tasks.data.parts import no_cycle_search, read_parts
from grpo_tasks.data.raw_table import RAW_ARROW
from grpo_tasks.data.records import Columns
from grpo_tasks.data.seen import Seen
from grpo_tasks.processes.lifetime import die_with_parent


def main() -> None:
    """Answer each span with two messages: what was seen (JSON), the rows (an Arrow stream)."""
    die_with_parent()
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    with Connection(descriptor) as connection, no_cycle_search():
        setting = json.loads(connection.recv_bytes())
        path, columns = Path(setting["path"]), Columns(**setting["columns"])
        while True:
            try:
                span = Span(*json.loads(connection.recv_bytes()))
            except EOFError:
                return
            records = read_span(path, span, answer_column=columns.answer)
            seen, rows = Seen(), pa.BufferOutputStream()
            with pa.ipc.new_stream(rows, RAW_ARROW) as stream:
                for part in read_parts(records, columns, side=setting["side"], source=setting["source"]):
                    stream.write_table(part.table)
                    seen.add(part.seen)
            connection.send_bytes(json.dumps(asdict(seen)).encode())
            connection.send_bytes(rows.getvalue())


if __name__ == "__main__":
    main()
