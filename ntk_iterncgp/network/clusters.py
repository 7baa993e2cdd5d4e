"""The one-epoch posterior: every datum in exactly one of B groups, and one action per group.

With a direction u_n for each datum and s_b = Σ_{n∈b} W_n u_n,

    A_b = Σ_{n∈b} J_nᵀ W_n u_n         one backward pass per group: one forward+backward epoch for all B
    R   = diag_b Σ_{n∈b} u_nᵀ W_n u_n  no product with J, no 1/π, no matrix of n rows

which is all that a `WeightPosterior` needs. A further pass takes another direction and other groups; where two passes
overlap, R has off-diagonal blocks. On digits (two networks, three seeds, 100 groups) the share of the exact contraction
of the variance, and what it cost:

    first pass, the two likeliest classes      83.6 %   1.3 epochs
    + the same contrast in other groups        86.4 %   2.3
    + a random direction                       89.2 %   2.3
    + the random subspace, split by groups     90.2 %   4.0
    + the residual, split by groups            89.6 %   3.0
    + the residual, one action                 83.9 %   3.0
    + the first class against the third        90.4 %   2.3

so further passes go through the contrasts, and after these through random directions.

Groups cost little to make and much to keep: a prediction multiplies by all actions. So the first pass has more groups
than actions (`groups_for`), and keeps the combinations of them that contract the variance most. On digits with a tanh
network of width 32 (two seeds) the share of the exact contraction with as many groups as actions, twice, four and eight
times as many, and with the best actions there are:

     20 actions   54.4   56.8   57.9   58.5 %    63.2 %
    100 actions   75.3   79.2   80.4   80.8 %    89.6 %

Decided data, whose W is next to nothing, are left out of the backward sweep of the first pass (`DECIDED`). An action
may have any number of rows that are zero, so the variance is not below the exact one as before. Later passes visit all.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ntk_iterncgp import parallel
from ntk_iterncgp.data import FixedOrderData, Inputs, slice_rows
from ntk_iterncgp.likelihoods import Likelihood
from ntk_iterncgp.network.grouping import group
from ntk_iterncgp.network.independence import best_combinations, block_matrix, independent_columns
from ntk_iterncgp.priors.jacobian import NetworkJacobian
from ntk_iterncgp.priors.ntk import curvature_traces
from ntk_iterncgp.weight_posterior import inner_products

PADDING = 8
GROUPS_PER_ACTION, MANY_GROUPS, MANY_BYTES = 4, 384, 2**29  # more of them fill no batches, and no memory is asked for
DECIDED, UNDECIDED = 0.01, 0.1
"""Decided are the data with the least tr(W) that together hold 1 % of the curvature, if each has less than a tenth of
the mean. What they would add to the contraction of the variance was at most 0.4 percentage points (digits, four
networks, 20 and 100 actions). They are 25 % of MNIST for a LeNet after two short epochs, 61 % after two more, 71 % of
CIFAR-10 for a ResNet-20."""


def groups_for(num_actions: int, num_data: int, bytes_each: int) -> int:
    """How many groups the first pass makes for so many actions."""
    many = min(GROUPS_PER_ACTION * num_actions, MANY_GROUPS, MANY_BYTES // max(1, bytes_each))
    return min(max(num_actions, many), num_data)


@dataclass(eq=False)
class Pass:
    """One partition of the data, with q directions for each datum: q·B actions. Filled in place while data are swept.

    The directions are scaled so that each action has unit noise, sᵀW⁺s = 1: a group of decided data then does not
    vanish beside the others in rounding.
    """

    labels: Tensor  # the group of each datum (N,)
    directions: Tensor  # u (q, N, C), float64
    images: Tensor  # A (q·B, P)
    swept: Tensor  # which data are in A already (N,)
    checksums: Tensor  # A h for a fixed h, summed on the way (q·B,), float64: what A is compared with in the end
    by_group: bool = False  # the data are visited group by group
    num_kept: int | None = None  # how many combinations of the groups' actions are kept; None: each of them by itself

    SUMS: ClassVar[tuple[str, ...]] = ("images", "checksums")
    """What is summed over data. Of several processes each has its own part of it while a sweep goes on."""

    @property
    def num_groups(self) -> int:
        return len(self.images) // len(self.directions)

    @property
    def is_complete(self) -> bool:
        return bool(self.swept.all())

    def counted(self) -> Tensor:  # (N,)
        """Which data are in the posterior. Where they come group by group, those of whole groups: an unfinished sum may
        say more about some input than the finished one, and the variance shall only fall."""
        if not self.by_group:
            return self.swept
        unfinished = torch.zeros(self.num_groups, dtype=torch.bool, device=self.swept.device)
        unfinished[self.labels[~self.swept]] = True
        return ~unfinished[self.labels]

    def add(self, rows: Tensor, gradients: Tensor, h: Tensor) -> None:
        """Put the gradients of some data, (r, q, P), or (q, P) summed over one group, where they belong."""
        images = self.images.view(len(self.directions), self.num_groups, -1)
        checksums = self.checksums.view(len(self.directions), -1)
        if gradients.ndim == 2:
            images[:, self.labels[rows[0]]] += gradients
            checksums[:, self.labels[rows[0]]] += gradients @ h
        else:
            images.index_add_(1, self.labels[rows], gradients.transpose(0, 1))
            checksums.index_add_(1, self.labels[rows], (gradients @ h).T.double())
        self.swept[rows] = True


@dataclass(frozen=True, eq=False)
class Actions:
    """The actions made of what had been swept at some time."""

    swept: list[int]  # how much that was, of each pass
    combinations: Tensor | None  # of the groups' actions (all groups, all actions); None: each by itself
    images: list[Tensor]  # A, pass by pass
    noise_gram: Tensor  # R (B, B), between those kept
    kept: Tensor  # which of all are independent (B,)


@dataclass(eq=False)
class Clusters:
    """The groups of one data set and what has been swept of them: enough to go on, without the data."""

    likelihood: Likelihood  # with unit noise; noise and temperature scale R later
    outputs: Tensor  # f(X; θ*) (N, C), float64
    targets: Tensor
    features: Tensor  # of the last layer (N, D)
    generator: torch.Generator
    passes: list[Pass] = field(default_factory=list)
    noise_blocks: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # of R, between complete passes
    gram_blocks: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # of AᵀA
    latest: Actions | None = None

    def __post_init__(self) -> None:
        # Nothing is divided by a probability here, so none needs a floor.
        self.likelihood = self.likelihood.for_prior_variance(1e20)

    def copy(self) -> Clusters:
        """To go on with, while this one stays as it is."""
        return replace(
            self,
            passes=list(self.passes),
            noise_blocks=dict(self.noise_blocks),
            gram_blocks=dict(self.gram_blocks),
            latest=None,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, C)."""
        return len(self.outputs), self.outputs.shape[1]

    @property
    def num_directions(self) -> int:
        """How many directions have been taken so far."""
        return sum(len(done.directions) for done in self.passes)

    @property
    def max_rank(self) -> int:
        """The rank of W: how many independent actions there are."""
        return len(self.outputs) * self.likelihood.curvature_rank

    @property
    def rank(self) -> int:
        """How many actions are in the posterior."""
        return len(self._actions().kept)

    def curvature(self, block: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:  # (r, C) or (r, C, k)
        """W V on some data."""
        columns = block[..., None] if block.ndim == 2 else block
        return self.likelihood.curvature(self.outputs[rows], columns).reshape(block.shape)

    def weights(self) -> Tensor:  # (N,)
        """How undecided each datum is, tr(W_n)."""
        return curvature_traces(lambda rows, block: self.curvature(block, rows), *self.shape, self.outputs.device)

    # --- choosing -------------------------------------------------------------------------------------------------

    def directions(self, number: int) -> Tensor:  # (q, N, C)
        """The next ones: the likelihood's own, in order, and random ones when these are used up."""
        chosen = []
        for index in range(self.num_directions, self.num_directions + number):
            if index < self.likelihood.curvature_rank:
                chosen.append(self.likelihood.cotangent(self.outputs, index))
            else:
                drawn = torch.randn(self.outputs.shape, generator=self.generator, dtype=torch.float64)
                chosen.append(self.likelihood.project(drawn.to(self.outputs.device)[..., None])[..., 0])
        return torch.stack(chosen)

    def new_pass(
        self, directions: Tensor, num_actions: int, like: Tensor, num_params: int, *, is_whole: bool = True
    ) -> Pass:  # (q, N, C)
        """Group the data for these directions. `like` gives the dtype and device of the images; `is_whole` says that
        the budget is enough for all of the pass."""
        weights, num_groups, num_kept = self.weights(), min(num_actions, len(self.outputs)), None
        decided = torch.zeros_like(weights, dtype=torch.bool)
        if not self.passes and num_actions < len(self.outputs):
            decided = _least(weights)
            if is_whole:
                bytes_each = len(directions) * num_params * like.element_size()
                num_groups = groups_for(num_actions, len(self.outputs), bytes_each)
                num_kept = len(directions) * num_actions
        directions = torch.where(decided[:, None], 0.0, directions)
        curved = self.curvature(directions[0])
        labels = (
            parallel.from_main(group(self.features, curved, weights, num_groups, self.generator))
            if num_groups > 1
            else torch.zeros(len(self.outputs), dtype=torch.long, device=self.outputs.device)
        )
        num_groups = int(labels.max()) + 1
        scaled = []
        for u in directions:
            noise = torch.zeros(num_groups, dtype=torch.float64, device=u.device)
            noise.index_add_(0, labels, (u * self.curvature(u)).sum(1))
            scaled.append(u * torch.where(noise > 0, noise.rsqrt(), 0.0)[labels, None])
        images = torch.zeros(len(directions) * num_groups, num_params, dtype=like.dtype, device=like.device)
        swept = decided.to(like.device)  # as far as they ever will be
        checksums = torch.zeros(len(images), dtype=torch.float64, device=like.device)
        return Pass(labels, torch.stack(scaled), images, swept, checksums, num_kept=num_kept)

    # --- sweeping -------------------------------------------------------------------------------------------------

    def sweep(
        self, target: Pass, jacobian: NetworkJacobian, data: FixedOrderData, chunk_bytes: int
    ) -> Generator[int, None, None]:
        """Fill in what is missing of a pass; yields the number of data done after each batch.

        A map-style dataset is visited group by group. Data that only come in order are differentiated one by one,
        and each gradient goes to its group. Several processes go through the same batches and take turns: each has the
        gradients of its own in `images` until `finish` sums them, and after every round all have done the same number.
        """
        if not parallel.is_main():  # what is there from before is counted once
            for name in target.SUMS:
                getattr(target, name).zero_()
        curved = torch.stack([self.curvature(u) for u in target.directions], 2)  # (N, C, q)
        target.by_group, h = data.can_jump(len(self.outputs)), checksum_vector(target.images)
        if target.by_group:
            batches = _group_batches(target.labels, ~target.swept, data.batch_size)
            mine = [_padded(rows, data.batch_size) for rows, is_mine in parallel.take_turns(batches) if is_mine]
            visited = zip(mine, data.visit(mine), strict=True)
            for rows, is_mine in parallel.take_turns(batches):
                if is_mine:
                    filled, (x, _) = next(visited)
                    cotangents = curved[filled].to(jacobian.dtype)
                    cotangents[len(rows) :] = 0
                    target.add(rows, jacobian.vjp(x, cotangents).T, h)  # (q, P)
                target.swept[rows] = True
                yield len(rows)
            return
        for (rows, x), is_mine in parallel.take_turns(_missing_rows(data, target.swept)):
            size = max(1, chunk_bytes // (3 * curved.shape[2] * jacobian.num_params * target.images.element_size()))
            for part in torch.arange(len(rows), device=rows.device).split(size) if is_mine else ():
                inputs = slice_rows(x, part, len(rows))
                cotangents = curved[rows[part]].to(jacobian.dtype)
                target.add(rows[part], jacobian.vjp_each(inputs, cotangents), h)
            target.swept[rows] = True
            yield len(rows)

    def finish(self, target: Pass) -> None:
        """After a sweep, or a part of one: the sums of all processes, in each."""
        for name in target.SUMS:
            setattr(target, name, parallel.all_sum(getattr(target, name)))
        self.latest = None

    def summed(self) -> Clusters:
        """As if the sweep that is going on were finished; it goes on from what it has."""
        if parallel.num_processes() == 1:
            return self
        *done, last = self.passes
        sums: dict[str, Any] = {name: parallel.all_sum(getattr(last, name).clone()) for name in last.SUMS}
        return replace(self, passes=[*done, replace(last, **sums)])

    # --- what there is ---------------------------------------------------------------------------------------------

    def noise_gram(self) -> Tensor:  # R (all groups, all groups)
        """SᵀW⁺S = UᵀWU over the data that count, between the groups of all passes."""
        parts = self._directions()
        complete = [done.is_complete for done, _ in parts]
        gram = block_matrix(self.noise_blocks, complete, lambda i, j: self._noise_block(*parts[i], *parts[j]))
        return 0.5 * (gram + gram.T)

    def image_gram(self) -> Tensor:  # (B, B)
        """AᵀA of the actions that are in the posterior."""
        found, gram = self._actions(), self._gram()
        if found.combinations is not None:
            gram = found.combinations.T @ gram @ found.combinations
        return gram[found.kept][:, found.kept]

    def _gram(self) -> Tensor:  # (all groups, all groups)
        """AᵀA of the groups. After a further pass only what is new of it is computed."""
        images = [done.images.T for done in self.passes]
        complete = [done.is_complete for done in self.passes]
        return block_matrix(self.gram_blocks, complete, lambda i, j: inner_products(images[i], images[j]))

    def keep_all(self) -> None:
        """Of a pass that is cut short each group stays as it is: what is made of all of them later might say less about
        some input than these do, and the variance shall only fall."""
        self.passes[-1].num_kept = self.latest = None

    def forget(self) -> None:
        """What was made of the images, which are others now; and small matrices."""
        self.gram_blocks.clear()
        self.noise_blocks.clear()
        self.latest = None

    def _directions(self) -> list[tuple[Pass, Tensor]]:
        return [(done, u * done.counted()[:, None]) for done in self.passes for u in done.directions]

    def _noise_block(self, left: Pass, u: Tensor, right: Pass, w: Tensor) -> Tensor:  # (B, B')
        values = (u * self.curvature(w)).sum(1)
        total = torch.zeros(left.num_groups * right.num_groups, dtype=torch.float64, device=values.device)
        total.index_add_(0, left.labels * right.num_groups + right.labels, values)
        return total.view(left.num_groups, right.num_groups)

    def actions(self) -> tuple[Tensor, Tensor]:
        """A (P, B) and R (B, B) of the actions that are there and independent."""
        found = self._actions()
        images = found.images[0] if len(found.images) == 1 else torch.cat(found.images)
        if len(found.kept) < len(images):
            leading = len(found.kept) == 0 or int(found.kept[-1]) < len(found.kept)  # as while groups come in order
            images = images[: len(found.kept)] if leading else images[found.kept]  # no copy of leading ones
        return images.T, found.noise_gram

    def group_images(self) -> Tensor:  # (P, all groups)
        images = [done.images for done in self.passes]
        return (images[0] if len(images) == 1 else torch.cat(images)).T

    def combinations(self) -> Tensor:  # (all groups, B)
        """Of the groups' actions, those that are in the posterior."""
        found = self._actions()
        if found.combinations is not None:
            return found.combinations[:, found.kept]
        number = sum(len(done.images) for done in self.passes)
        return torch.eye(number, dtype=torch.float64, device=found.kept.device)[:, found.kept]

    def _actions(self) -> Actions:
        swept = [int(done.swept.sum()) for done in self.passes]
        if self.latest is None or self.latest.swept != swept:
            gram, images = self.noise_gram(), [done.images for done in self.passes]
            blocks: list[Tensor] = []
            combinations = None
            for i, done in enumerate(self.passes):
                start = sum(map(len, blocks))
                own = gram[start : start + len(done.images), start : start + len(done.images)]
                best = self._best(i, own)
                blocks.append(torch.eye(len(own), dtype=gram.dtype, device=gram.device) if best is None else best)
                if best is not None:
                    images[i] = best.T.to(images[i].dtype) @ images[i]
            if any(len(block.T) < len(block) for block in blocks):
                combinations = torch.block_diag(*blocks)
                gram = combinations.T @ gram @ combinations
            kept = independent_columns(gram)
            self.latest = Actions(swept, combinations, images, gram[kept][:, kept], kept)
        return self.latest

    def _best(self, index: int, noise: Tensor) -> Tensor | None:  # R (B_i, B_i) -> (B_i, num_kept)
        """What to keep of one pass; None: the actions of its groups, as also while they are swept."""
        done = self.passes[index]
        if done.num_kept is None or not done.is_complete:
            return None
        if (index, index) not in self.gram_blocks:
            images = done.images.T
            self.gram_blocks[index, index] = inner_products(images, images)
        return best_combinations(noise, self.gram_blocks[index, index], done.num_kept)

    def spread(self, contributions: Tensor) -> Tensor:  # (b, all groups) -> (b, N)
        """What belongs to groups, given to their data in proportion to uᵀWu, of which each action has 1 in all."""
        result, start = contributions.new_zeros(len(contributions), len(self.outputs)), 0
        for done, u in self._directions():
            part = contributions[:, start : start + done.num_groups]
            share = (u * self.curvature(u)).sum(1)
            size = torch.zeros(done.num_groups, dtype=share.dtype, device=share.device)
            size.index_add_(0, done.labels, share)  # 1, or less for a group that is not all swept
            result += part[:, done.labels] * (share / size[done.labels].clamp_min(1e-300))
            start += done.num_groups
        return result


def _least(weights: Tensor) -> Tensor:  # (N,)
    """Which data are decided."""
    ordered, order = weights.sort()
    few = ordered.cumsum(0) < DECIDED * weights.sum()
    decided = torch.zeros_like(few)
    decided[order] = few & (ordered < UNDECIDED * weights.mean())
    return decided


def checksum_vector(images: Tensor) -> Tensor:  # (q·B, P) -> (P,)
    """The h of the checksums: the same random numbers for every pass over the same weights."""
    drawn = torch.randn(images.shape[1], generator=torch.Generator().manual_seed(0))
    return drawn.to(images)


def _group_batches(labels: Tensor, missing: Tensor, batch_size: int) -> list[Tensor]:
    """The rows that are missing, group by group: a group in as few batches as it takes, of nearly the same size."""
    rows = missing.nonzero()[:, 0]
    rows = rows[labels[rows].argsort(stable=True)]
    sizes = torch.bincount(labels[rows]).tolist() if len(rows) else []
    groups = [whole for whole in rows.split(sizes) if len(whole)]
    return [part for whole in groups for part in whole.tensor_split(-(-len(whole) // batch_size))]


def _padded(rows: Tensor, batch_size: int) -> Tensor:
    """Filled up with copies to a multiple of `PADDING`: convolutions are prepared anew for every size of a batch."""
    size = max(len(rows), min(batch_size, -(-len(rows) // PADDING) * PADDING))
    return torch.cat([rows, rows[:1].expand(size - len(rows))])


def _missing_rows(data: FixedOrderData, swept: Tensor) -> Iterator[tuple[Tensor, Inputs]]:
    """The rows not swept yet, in the order in which they come."""
    start = 0
    for x, _ in data.batches():
        size = data.num_rows(x)
        here = (~swept[start : start + size]).nonzero()[:, 0]
        if len(here):
            yield start + here, slice_rows(x, here, size)
        start += size
