"""Which model answers, if any, and what else the routes share."""

from __future__ import annotations

import asyncio
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

from mlx_dspark.serving.ask import Ask, Defaults
from mlx_dspark.serving.dialects.base import About, Dialect
from mlx_dspark.serving.faults import refused
from mlx_dspark.serving.generate import Generation, Model
from mlx_dspark.serving.streaming import Answering, Clock


class Host:
    """What the routes of one server share."""

    def __init__(self, model: Model | None, defaults: Defaults, clock: Clock | None = None) -> None:
        self.model = model
        self.defaults = defaults
        self.clock = clock or Clock()
        self._rendering = ThreadPoolExecutor(1, "render")

    async def answer(self, dialect: Dialect, body: object) -> Answering:
        """The response to a checked body. Raises what refuses it."""
        ask = dialect.decode(body, self.defaults)
        model = self._ready()
        loop = asyncio.get_running_loop()
        prompts = [await loop.run_in_executor(self._rendering, model.render, each) for each in ask.prompts]
        generation = Generation(model, ask, prompts)
        about = self._about(model, ask, tuple(len(prompt.ids) for prompt in prompts))
        return Answering(
            generation,
            dialect.encoder(ask, about),
            stream=ask.stream,
            clock=self.clock,
            error_body=dialect.error,
            done=lambda _: None,
        )

    def _ready(self) -> Model:
        if self.model is None:
            raise refused("overloaded", "No model is loaded.")
        return self.model

    def _about(self, model: Model, ask: Ask, prompt_tokens: tuple[int, ...]) -> About:
        name = ask.model or model.session.name
        return About(uuid.uuid4().hex, int(time.time()), name, model.session.mode, prompt_tokens)
