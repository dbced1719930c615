"""How a launch is laid out: what a warp, a block and a multiprocessor hold of an attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from mlx_dspark.kernels.cuda_common.device import MULTIPROCESSORS

TILE = 16
"""Queries, or keys, of a tile."""

SHARED = 96 * 1024
"""Bytes of tiles that a block has in shared memory: any device with these instructions lets it."""

ALONE = 8
"""A team takes so many tiles of keys before they are split over blocks, which costs a second kernel."""


class Geometry(NamedTuple):
    """One way to lay the launch out.

    tiles     of 16 queries that a warp has in registers, and sums each piece of a key and a value for
    sides     warps that share a tile of keys, each for queries of its own: a team
    teams     of a block, which take tiles of keys in turn and are summed at the end
    stages    of tiles of keys that a team has in shared memory: one in use, the others on their way
    resident  blocks that a multiprocessor is to hold at once
    in_turn   1 where blocks take tiles of keys in turn, and 0 where each has a range of them
    """

    tiles: int
    sides: int
    teams: int
    stages: int
    resident: int
    in_turn: int = 0

    @property
    def queries(self) -> int:
        """Of a block: those of one group of heads read its keys once."""
        return TILE * self.tiles * self.sides

    @property
    def warps(self) -> int:
        return self.sides * self.teams

    def shared_bytes(self, dim: int) -> int:
        """Of a block. What the teams summed lies where the tiles were."""
        ring = self.teams * self.stages * 2 * TILE * 2 * dim
        sums = self.warps * self.tiles * (TILE * dim * 4 + 2 * 2 * 32 * 4)
        return max(ring, sums)


class Plan(NamedTuple):
    """`parts`: blocks that share out the queries of a group of heads; `splits`: ranges of the keys."""

    geometry: Geometry
    parts: int
    splits: int


def plan(queries: tuple[int, ...], keys: tuple[int, ...], geometry: Geometry | None = None) -> Plan:
    """For queries `[rows, heads, width, dim]` and keys `[rows, kv_heads, length, dim]`. Few keys are one
    block's, in small parts; of many, every block gets as much as any other, and no team next to nothing."""
    rows, heads, width, dim = queries
    group, tiles = heads // keys[1] * width, -(-keys[2] // TILE)
    if geometry is None:
        geometry = alone(dim)
        if tiles > ALONE * geometry.teams:
            geometry = streaming(dim, group)[0]
    parts = -(-group // geometry.queries)
    if tiles <= ALONE * geometry.teams:
        return Plan(geometry, parts, 1)
    shares = MULTIPROCESSORS * geometry.resident // (rows * keys[1] * parts)
    return Plan(geometry, parts, max(1, min(shares, tiles // (2 * geometry.teams))))


@cache
def alone(dim: int) -> Geometry:
    """For keys that one block takes: as many teams as it has room for, so that none waits for long."""
    return _filling(dim, tiles=1, sides=1, teams=512 // dim, resident=1)


@cache
def streaming(dim: int, queries: int) -> Sequence[Geometry]:
    """For many keys and so many queries of a group of heads: best guess first, then others to measure."""
    if queries <= TILE:
        first = _filling(dim, tiles=1, sides=1, teams=4)
        others = (first._replace(stages=2 * first.stages // 3, resident=3),)
    elif queries <= 2 * TILE:
        first = _filling(dim, tiles=2, sides=1, teams=4)
        others = _filling(dim, tiles=1, sides=2, teams=4), _filling(dim, tiles=1, sides=1, teams=4)
    else:
        first = _filling(dim, tiles=2, sides=2, teams=2)
        others = _filling(dim, tiles=1, sides=4, teams=2), _filling(dim, tiles=2, sides=1, teams=4)
    wide = first._replace(teams=2 * first.teams, resident=1)
    return first, wide, first._replace(in_turn=1), wide._replace(in_turn=1), *others


def _filling(dim: int, tiles: int, sides: int, teams: int, resident: int = 2) -> Geometry:
    """With as many stages as fit, up to six."""
    return Geometry(tiles, sides, teams, min(6, SHARED // (teams * 4 * TILE * dim)), resident)
