"""Many clients on one server, for as long as asked: they read, leave, cancel, send nonsense; nothing leaks,
hangs or mixes. And the rate of a stream against `generate`'s.

    python -m benchmarks.serving                              # 64 clients for 10 minutes, the default model
    python -m benchmarks.serving --seconds 60 --clients 16 --model FOLDER -- --mode lookup
    python -m benchmarks.serving --rate                       # streamed tokens a second against generate's

The server is a process of its own, `mlx-dspark serve` with what stands after `--`. Every answer that is read
to its end must be the one its request gets alone. A cancel takes from when the client closes its connection
to when the engine has let go of the request. Ends with an error when an answer differs, a request fails that
should not, a bad body is not refused, a cancel at the 99th percentile takes longer than `--cancel-seconds`,
or requests, connections, threads or memory are left over; with `--rate`, when the stream is slower than
`--least-rate` of `generate`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from time import monotonic, perf_counter
from typing import IO, Any

import httpx
import psutil

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
STARTING = 600.0
ONE = 300.0
"""Seconds after which a request counts as stuck."""
SAID = (
    "Name three colours.",
    "Write a haiku about rain.",
    "Count from one to ten in words.",
    "What is a prime number?",
    "Repeat after me: the quick brown fox jumps over the lazy dog.",
    "def reverse(text):",
)
BAD = (
    b"{",
    b"[]",
    b'{"messages": []}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": -1}',
    b'{"messages": [{"role": "robot", "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "n": 1000}',
    b'{"prompt": 3}',
)


@dataclass
class Seen:
    """What the clients met."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    left: dict[str, float] = field(default_factory=dict)


def supply(tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """Requests as route and body: greedy, drawn with a seed, stopped, penalised, raw."""
    asked: list[tuple[str, dict[str, Any]]] = []
    for i, said in enumerate(SAID):
        messages = [{"role": "user", "content": said}]
        asked += [
            (CHAT, {"messages": messages, "max_tokens": tokens}),
            (CHAT, {"messages": messages, "max_tokens": tokens // 2, "stop": [" the", "\n\n"]}),
            (TEXT, {"prompt": said, "max_tokens": tokens // 2, "repetition_penalty": 1.2 + i / 10}),
        ]
    return asked


class Client:
    """One of many, with its own dice."""

    def __init__(self, number: int, url: str, asked: Sequence[Any], alone: Sequence[str], seen: Seen) -> None:
        self._number = number
        self._url = url
        self._asked = asked
        self._alone = alone
        self._seen = seen
        self._dice = random.Random(number)

    async def run(self, seconds: float) -> None:
        end, turn = monotonic() + seconds, 0
        while monotonic() < end:
            turn += 1
            name = f"{self._number}/{turn}"
            act = self._dice.choices(
                (self._streamed, self._plain, self._leave_stream, self._leave_plain, self._nonsense),
                weights=(35, 25, 20, 10, 10),
            )[0]
            try:
                async with asyncio.timeout(ONE):
                    outcome = await act(name)
            except TimeoutError:
                outcome = "stuck"
                self._seen.wrong.append(f"{name} was not answered within {ONE:g} s")
            except httpx.HTTPError as error:
                outcome = "broken"
                self._seen.wrong.append(f"{name}: {error!r}")
            self._seen.outcomes[outcome] += 1

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._url, timeout=ONE, verify=False)

    def _pick(self) -> tuple[int, str, dict[str, Any]]:
        which = self._dice.randrange(len(self._asked))
        path, body = self._asked[which]
        return which, path, body

    async def _plain(self, name: str) -> str:
        which, path, body = self._pick()
        async with self._client() as client:
            told = await client.post(path, json={**body, "model": name})
        if told.status_code == 429:
            await asyncio.sleep(min(2.0, float(told.headers["retry-after"])))
            return "told to come again"
        if told.status_code != 200:
            self._seen.wrong.append(f"{name}: {told.status_code} {told.text[:200]}")
            return "failed"
        return self._compare(name, which, text_of(told.json()))

    async def _streamed(self, name: str) -> str:
        which, path, body = self._pick()
        pieces: list[str] = []
        async with (
            self._client() as client,
            client.stream("POST", path, json={**body, "model": name, "stream": True}) as told,
        ):
            if told.status_code == 429:
                return "told to come again"
            async for frame in frames_of(told):
                if frame == "[DONE]":
                    return self._compare(name, which, "".join(pieces))
                pieces += piece_of(frame)
        self._seen.wrong.append(f"{name}: the stream broke off, {told.status_code}")
        return "failed"

    def _compare(self, name: str, which: int, text: str) -> str:
        if text != self._alone[which]:
            self._seen.wrong.append(f"{name}, request {which}: {text!r} and alone {self._alone[which]!r}")
            return "differed"
        return "equal"

    async def _leave_stream(self, name: str) -> str:
        """Read some frames, and hang up."""
        _, path, body = self._pick()
        async with (
            self._client() as client,
            client.stream("POST", path, json={**body, "model": name, "stream": True}) as told,
        ):
            frames, wanted = frames_of(told), self._dice.randrange(1, 8)
            async for frame in frames:
                wanted -= 1
                if frame == "[DONE]":
                    return "left after the end"
                if wanted <= 0:
                    break
            self._seen.left[name] = monotonic()
        return "left a stream"

    async def _leave_plain(self, name: str) -> str:
        """Wait a while, and hang up."""
        _, path, body = self._pick()
        try:
            async with asyncio.timeout(self._dice.uniform(0.05, 2.0)), self._client() as client:
                told = await client.post(path, json={**body, "model": name})
                return "left too late" if told.status_code in (200, 429) else "failed"
        except TimeoutError:
            self._seen.left[name] = monotonic()
            return "left a plain one"

    async def _nonsense(self, name: str) -> str:
        content = self._dice.choice(BAD)
        async with self._client() as client:
            told = await client.post(CHAT, content=content, headers={"content-type": "application/json"})
        if told.status_code != 400:
            self._seen.wrong.append(f"{name}: {content!r} was told {told.status_code}")
        return "refused"


def text_of(answer: dict[str, Any]) -> str:
    """The text of a plain answer."""
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def piece_of(frame: Any) -> list[str]:
    """The text of a frame."""
    if "error" in frame:
        return [f"<error: {frame['error']['message']}>"]
    return [each.get("text") or each.get("delta", {}).get("content") or "" for each in frame["choices"]]


async def frames_of(told: httpx.Response) -> AsyncIterator[Any]:
    """The frames of a stream."""
    async for line in told.aiter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


async def soak(url: str, clients: int, seconds: float, tokens: int, watch: Callable[[], None]) -> Seen:
    """All clients at once, against what each request gets alone."""
    asked, seen = supply(tokens), Seen()
    async with httpx.AsyncClient(base_url=url, timeout=ONE) as client:
        alone = [text_of((await client.post(path, json=body)).json()) for path, body in asked]
    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(Client(number, url, asked, alone, seen).run(seconds))
        group.create_task(_watched(seconds, watch))
    async with httpx.AsyncClient(base_url=url, timeout=ONE) as client:
        for path, body in asked[:1]:
            assert text_of((await client.post(path, json=body)).json()) == alone[0]
    return seen


async def _watched(seconds: float, watch: Callable[[], None]) -> None:
    """Look at the server when it has met everything, and again at the end of the soak."""
    for _ in range(4):
        await asyncio.sleep(seconds / 4)
        watch()


@dataclass
class Held:
    """What the server's process held at one time."""

    memory: int
    files: int
    threads: int

    @classmethod
    def by(cls, process: psutil.Process) -> Held:
        return cls(process.memory_info().rss, process.num_fds(), process.num_threads())

    def __str__(self) -> str:
        return f"{self.memory / 1e6:.0f} MB, {self.files} files, {self.threads} threads"


@contextmanager
def server(flags: Sequence[str], log: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The server in a process of its own, which notes when the engine lets go of each request."""
    command = [sys.executable, "-m", "benchmarks.serving", "--as-server", str(log), "--", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stderr is not None
        try:
            url = _address(process.stderr)
            relay = Thread(target=_relay, args=(process.stderr,))
            relay.start()
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(60)
        relay.join()


def _address(said: IO[str]) -> str:
    for line in said:
        print(line, end="", file=sys.stderr)
        if line.startswith("Listening on "):
            return line.removeprefix("Listening on ").strip()
    raise SystemExit("The server did not start.")


def _relay(said: IO[str]) -> None:
    for line in said:
        print(line, end="", file=sys.stderr)


def as_server(log: Path, flags: Sequence[str]) -> int:
    """`mlx-dspark serve`, with a note of when the engine let go of each request, by the name in `model`."""
    from mlx_dspark.cli.main import run
    from mlx_dspark.serving.model import Model

    submit = Model.submit
    notes = log.open("a", buffering=1)

    def noting(self: Model, ask: Any, rendered: Any, nth: int, notify: Callable[[], None]) -> Any:
        begun: list[Any] = []

        def heard() -> None:
            notify()
            if begun and begun[0].ended:
                notes.write(f"ended {ask.model or '-'} {monotonic()}\n")

        notes.write(f"begun {ask.model or '-'} {monotonic()}\n")
        begun.append(submit(self, ask, rendered, nth, heard))
        return begun[0]

    Model.submit = noting  # pyright: ignore[reportAttributeAccessIssue]
    return run(["serve", *flags])


def cancels(seen: Seen, log: Path) -> list[float]:
    """Seconds from when each client left to when the engine let go; one it had already let go of took 0, and
    one that left before the engine had heard of it is not counted."""
    noted: dict[str, dict[str, float]] = {"begun": {}, "ended": {}}
    for line in log.read_text().splitlines():
        what, name, at = line.split()
        noted[what][name] = float(at)
    ended = noted["ended"]
    lost = [name for name in seen.left if name in noted["begun"] and name not in ended]
    seen.wrong += [f"{name} was left, and the engine never let go of it" for name in lost]
    return sorted(max(0.0, ended[name] - at) for name, at in seen.left.items() if name in ended)


def run_soak(options: argparse.Namespace) -> int:
    """The soak, and what was wrong with it."""
    flags = [*_model(options), "--port", "0", "--max-batch", str(options.max_batch), *options.flags]
    with TemporaryDirectory() as folder:
        log = Path(folder) / "ended"
        log.touch()
        with server(flags, log) as (url, process):
            held: list[Held] = [Held.by(process)]

            def look() -> None:
                held.append(Held.by(process))

            seen = asyncio.run(soak(url, options.clients, options.seconds, options.tokens, look))
            health = httpx.get(f"{url}/health").json()
            held.append(Held.by(process))
        taken = cancels(seen, log)
    print(f"{sum(seen.outcomes.values())} requests: {dict(seen.outcomes)}")
    print("held: " + " | ".join(map(str, held)))
    if taken:
        p99 = taken[min(len(taken) - 1, int(0.99 * len(taken)))]
        middle = statistics.median(taken)
        print(f"{len(taken)} cancels: median {middle:.3f} s, p99 {p99:.3f} s, most {taken[-1]:.3f} s")
        if p99 > options.cancel_seconds:
            seen.wrong.append(f"the 99th percentile of cancels is {p99:.3f} s")
    seen.wrong += left_over(held, health, options.memory_mb)
    for line in seen.wrong[:20]:
        print(f"WRONG: {line}")
    print(f"{len(seen.wrong)} things wrong")
    return 1 if seen.wrong else 0


def left_over(held: Sequence[Held], health: dict[str, Any], memory_mb: float) -> list[str]:
    """What leaked: `held` is before, four times within, and after."""
    wrong = [] if health["under_way"] == 0 else [f"{health['under_way']} answers are still under way"]
    grown = (held[-1].memory - held[2].memory) / 1e6
    if grown > memory_mb:
        wrong.append(f"memory grew by {grown:.0f} MB in the second half")
    if held[-1].files > held[0].files + 8:
        wrong.append(f"{held[-1].files - held[0].files} files or connections are left open")
    if held[-1].threads > held[0].threads + 8:
        wrong.append(f"{held[-1].threads - held[0].threads} threads are left")
    return wrong


def run_rate(options: argparse.Namespace) -> int:
    """Decoding rates of a stream and of `generate`, by turns, each in its own process."""
    import mlx_dspark

    prompt = SAID[0]
    rates: dict[str, list[float]] = {"generate": [], "streamed": []}
    with TemporaryDirectory() as folder:
        log = Path(folder) / "ended"
        log.touch()
        with (
            server([*_model(options), "--port", "0", "--mode", options.mode], log) as (url, _),
            mlx_dspark.load(options.model, mode=options.mode) as session,
            httpx.Client(timeout=ONE) as client,
        ):
            for turn in range(options.turns + 1):
                result = session.generate(prompt, max_new_tokens=options.tokens)
                streamed = streamed_rate(client, url, prompt, options.tokens)
                if turn:
                    rates["generate"].append(result.decode_tokens_per_sec)
                    rates["streamed"].append(streamed)
    middle = {name: statistics.median(values) for name, values in rates.items()}
    ratio = statistics.median(s / g for s, g in zip(rates["streamed"], rates["generate"], strict=True))
    told = ", ".join(f"{name} {rate:.1f} tok/s" for name, rate in middle.items())
    print(f"{told}, median ratio of the turns {ratio:.3f}")
    return 0 if ratio >= options.least_rate else 1


def streamed_rate(client: httpx.Client, url: str, prompt: str, tokens: int) -> float:
    """Tokens a second as a client sees them, from the first to the last. What came is looked at afterwards,
    so that this process takes nothing from the server's."""
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "stream": True}
    body["stream_options"] = {"include_usage": True}
    came: list[tuple[float, bytes]] = []
    with client.stream("POST", url + CHAT, json=body) as told:
        for raw in told.iter_raw():
            came.append((perf_counter(), raw))
    with_text = [at for at, raw in came if b'"content":"' in raw and b'"role"' not in raw]
    last = json.loads(b"".join(raw for _, raw in came).split(b"data: ")[-2])
    return (last["usage"]["completion_tokens"] - 1) / (with_text[-1] - with_text[0])


def _model(options: argparse.Namespace) -> list[str]:
    return ["--model", options.model] if options.model else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked; 1 where something was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--tokens", type=int, default=32, help="most tokens of an answer")
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--model", default=None)
    parser.add_argument("--cancel-seconds", type=float, default=1.0)
    parser.add_argument("--memory-mb", type=float, default=100.0, help="most growth in the second half")
    parser.add_argument("--rate", action="store_true", help="compare rates in place of the soak")
    parser.add_argument("--mode", default="auto", help="who drafts, on both sides, with --rate")
    parser.add_argument("--least-rate", type=float, default=0.97, help="lowest ratio to generate's rate")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--as-server", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="flags of mlx-dspark serve, after --")
    options = parser.parse_args(arguments)
    if options.as_server is not None:
        return as_server(options.as_server, options.flags)
    return run_rate(options) if options.rate else run_soak(options)


if __name__ == "__main__":
    sys.exit(main())
