"""Serve the local full-text index under Search-R1's retrieval API, for its clients and for search_engine=retriever.

    python scripts/serve_index.py corpus.jsonl [--out DIR] [--port 8000] [--topk 3]

``POST /retrieve`` takes {"queries": [...], "topk": n, "return_scores": bool} and gives {"result": [documents of each
query]}; a document is {"id", "contents": "\\"title\\"\\ntext", "title", "url", "text"}, with scores {"document",
"score"}. A score is 1 / rank: the index puts exact titles first, so there is no number that orders everything.

It listens on 127.0.0.1. On another --host it asks for the bearer token in SCRL_TOKEN; for clients that send none, such
as Search-R1's, leave it at 127.0.0.1 and use a tunnel (ssh -N -L 8000:127.0.0.1:8000 this-machine).
"""

import argparse
import sys
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Response
from pydantic import BaseModel, Field

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it runs from any directory, installed or not

from scrl.handler.http_service import json_response, make_app, serve  # noqa: E402
from scrl.handler.web_search_agent.local_index import LocalIndex, Row  # noqa: E402

MAX_QUERIES, MAX_TOPK = 1024, 100


class RetrieveRequest(BaseModel):
    queries: Annotated[list[str], Field(max_length=MAX_QUERIES)]
    topk: Annotated[int, Field(ge=1, le=MAX_TOPK)] | None = None
    return_scores: bool = False


def create_app(index: LocalIndex, topk: int = 3) -> FastAPI:
    """``topk``: documents a query, where a request says nothing."""

    app = make_app("retrieval server")

    @app.post("/retrieve")
    def retrieve(request: RetrieveRequest) -> Response:  # not a coroutine: requests search side by side, in threads
        found = [index.search(query, request.topk or topk) for query in request.queries]
        results = [[_document(row) for row in rows] for rows in found]
        if not request.return_scores:
            return json_response({"result": results})
        scored = [[{"document": one, "score": 1 / rank} for rank, one in enumerate(rows, 1)] for rows in results]
        return json_response({"result": scored})

    @app.get("/health")
    async def health() -> Response:
        return json_response({"status": "ok", "pages": len(index)})

    return app


def _document(row: Row) -> dict[str, str]:
    return {"id": row["url"], "contents": f'"{row["title"]}"\n{row["text"]}', **row}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", nargs="+", type=Path, help=".jsonl, .jsonl.gz or .parquet of {title, url, text}")
    parser.add_argument("--out", type=Path, help="folder of the index (default: index/ beside the corpus)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--topk", type=int, default=3, help="documents a query, where a request says nothing")
    args = parser.parse_args()
    try:
        if not 1 <= args.topk <= MAX_TOPK:
            raise ValueError(f"--topk={args.topk} is out of range; give 1 to {MAX_TOPK}")
        index = LocalIndex.open(args.corpus, args.out or args.corpus[0].parent / "index")
        return serve(create_app(index, args.topk), args.host, args.port, f"retrieval server ({len(index):,} pages)")
    except ValueError as error:
        print(f"serve_index: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
