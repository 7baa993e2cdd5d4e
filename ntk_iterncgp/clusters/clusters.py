"""The one-epoch posterior: data and directions in groups, and one action per group.

With a direction u for each item i, which is a datum n(i) visited in one direction, and s_b = Σ_{i∈b} W_n u_i,

    A_b = Σ_{i∈b} J_nᵀ W_n u_i     one backward pass per group: one forward+backward epoch for as many items as data
    R   = UᵀWU                     no product with J, no 1/π, no matrix of n rows

which is all that a `WeightPosterior` needs. Directions of one datum are orthogonal in W, so within the first pass R is
diagonal; between two passes it has blocks that are not.

The first pass goes where the curvature is (`first_directions`): of all data and directions those with the largest parts
of tr(W), 0.6 for each datum, so that saturated data have none and others up to four; as many as actions where these are
more than data (60 digits, ReLU 64-16-10, 200 actions: 82 % of the exact contraction, with one for each datum 60 %). On
800 digits, five seeds, the fraction of the exact contraction of the variance at new inputs with 20, 50, 100 and 500
actions (for 500, more visits):

    tanh 64-32-10   one direction for each uncertain datum   58.7   69.9   80.5   86.8 %   1.06 epochs
                    where the curvature is                   61.1   72.7   84.0   94.1 %   0.93, and 1.33 for 500
    ReLU 64-16-10   one direction for each uncertain datum   71.1   80.3   88.0   92.3 %   1.07 epochs
                    where the curvature is                   73.4   82.6   90.4   96.2 %   0.93, and 1.33 for 500

An action may have any number of rows that are zero, so the variance is not below the exact one. With `cotangents` > 1
each uncertain datum has so many, from one forward pass.

A further pass takes the next direction of all data in other groups, and after these random directions. On both networks
(two seeds, 100 actions in each pass) one, two and three passes get 87.9, 91.2 and 93.3 %.

Groups cost little to make and much to keep: a prediction multiplies by all actions. So the first pass has more groups
than actions (`groups_for`), and keeps the combinations of them that contract the variance most.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ntk_iterncgp.clusters.grouping import (
    along,
    cotangents_each,
    first_directions,
    group,
    groups_for,
    has_choice,
    next_directions,
)
from ntk_iterncgp.data.fixed_order import FixedOrderData, Inputs, slice_rows
from ntk_iterncgp.jacobian.rows import NetworkJacobian
from ntk_iterncgp.likelihoods.base import Likelihood
from ntk_iterncgp.likelihoods.leading import Leading
from ntk_iterncgp.linalg.factor import (
    best_combinations,
    block_matrix,
    combined_gram,
    independent_columns,
    inner_products,
    rows_at_once,
)
from ntk_iterncgp.runtime import parallel

PADDING = 8


@dataclass(eq=False)
class Pass:
    """Groups of data, with q directions for each: q·B actions. Filled in place while data are swept.

    A datum may be in it several times, each time with another direction and maybe in another group, or not at all.
    The directions are scaled so that each action has unit noise, sᵀW⁺s = 1: a group of saturated data then does not
    vanish beside the others in rounding.
    """

    rows: Tensor  # which data these are, in ascending order (m,)
    labels: Tensor  # the group of each (m,)
    directions: Tensor  # u (q, m, C), float64
    images: Tensor  # A (q·B, P)
    swept: Tensor  # which are in A already (m,)
    checksums: Tensor  # A h for a fixed h, summed on the way (q·B,), float64: what A is compared with in the end
    by_group: bool = False  # the data are visited group by group
    num_kept: int | None = None  # how many combinations of the groups' actions are retained; None: each by itself

    SUMS: ClassVar[tuple[str, ...]] = ("images", "checksums")
    """What is summed over data. Of several processes each has its own part of it while a sweep goes on."""

    @property
    def num_groups(self) -> int:
        """How many groups the pass has."""
        return len(self.images) // len(self.directions)

    @property
    def is_complete(self) -> bool:
        """Whether all of its data have been swept."""
        return bool(self.swept.all())

    def counted(self) -> Tensor:  # (m,)
        """Return which of the data are in the posterior.

        Where they come group by group, those of whole groups: an unfinished sum may say more about some input than the
        finished one, and the variance shall only fall.
        """
        if not self.by_group:
            return self.swept
        unfinished = torch.zeros(self.num_groups, dtype=torch.bool, device=self.swept.device)
        unfinished[self.labels[~self.swept]] = True
        return ~unfinished[self.labels]

    def add(self, items: Tensor, gradients: Tensor, h: Tensor) -> None:
        """Put the gradients of some of them, (r, q, P), or (q, P) summed over one group, where they belong."""
        images = self.images.view(len(self.directions), self.num_groups, -1)
        checksums = self.checksums.view(len(self.directions), -1)
        if gradients.ndim == 2:
            images[:, self.labels[items[0]]] += gradients
            checksums[:, self.labels[items[0]]] += gradients @ h
        else:
            images.index_add_(1, self.labels[items], gradients.transpose(0, 1))
            checksums.index_add_(1, self.labels[items], (gradients @ h).T.double())
        self.swept[items] = True


def epochs_of(num_items: int, number: int, num_data: int) -> float:
    """A forward pass and a backward pass for each of `number` directions, which is twice as much."""
    return num_items * (1 + 2 * number) / (3 * num_data)


def same_datum(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:  # (m,), (m',) -> (k,), (k,)
    """All pairs of places at which two ascending lists of rows have the same datum."""
    first, last = torch.searchsorted(right, left), torch.searchsorted(right, left, right=True)
    times = last - first
    i = torch.arange(len(left), device=left.device).repeat_interleave(times)
    within = torch.arange(len(i), device=left.device) - (times.cumsum(0) - times)[i]
    return i, first[i] + within


def checksum_vector(images: Tensor) -> Tensor:  # (q·B, P) -> (P,)
    """The h of the checksums: the same random numbers for every pass over the same weights."""
    drawn = torch.randn(images.shape[1], generator=torch.Generator().manual_seed(0))
    return drawn.to(images)


def group_batches(labels: Tensor, missing: Tensor, batch_size: int) -> list[Tensor]:
    """The items that are missing, group by group: a group in as few batches as it takes, of nearly the same size."""
    items = missing.nonzero()[:, 0]
    items = items[labels[items].argsort(stable=True)]
    sizes = torch.bincount(labels[items]).tolist() if len(items) else []
    groups = [whole for whole in items.split(sizes) if len(whole)]
    return [part for whole in groups for part in whole.tensor_split(-(-len(whole) // batch_size))]


def padded(items: Tensor, batch_size: int) -> Tensor:
    """Filled up with copies to one of a few sizes: convolutions are prepared anew for every size of a batch."""
    return torch.cat([items, items[:1].expand(padded_size(len(items), batch_size) - len(items))])


def padded_size(size: int, batch_size: int) -> int:
    """A power of two up to `PADDING`, then its multiples: a group of one datum does not cost as much as eight."""
    whole = -(-size // PADDING) * PADDING if size > PADDING else 2 ** (size - 1).bit_length()
    return max(size, min(batch_size, whole))


def missing_items(data: FixedOrderData, rows: Tensor, swept: Tensor) -> Iterator[tuple[Tensor, Inputs]]:
    """Those not swept yet, with their inputs, in the order in which the data come."""
    start = 0
    for x, _ in data.batches():
        size = data.num_rows(x)
        here = ((rows >= start) & (rows < start + size) & ~swept).nonzero()[:, 0]
        if len(here):
            yield here, slice_rows(x, rows[here] - start, size)
        start += size


PRODUCTS_AT_ONCE = 2**16  # between directions of the same data, of which there may be more than data


@dataclass(frozen=True, eq=False)
class Actions:
    """The actions made of what had been swept at some time."""

    swept: list[int]  # how much that was, of each pass
    combinations: list[Tensor | None]  # of the groups' actions (groups, actions), pass by pass; None: each by itself
    images: list[Tensor]  # A, pass by pass
    noise_gram: Tensor  # R (B, B), between those retained
    kept: Tensor  # which of all are independent (B,)


@dataclass(eq=False)
class Clusters:
    """The groups of one data set and what has been swept of them: enough to resume, without the data."""

    likelihood: Likelihood  # with unit noise; noise and temperature scale R later
    outputs: Tensor  # f(X; θ*) (N, C), float64
    targets: Tensor
    features: Tensor  # of the last layer (N, D)
    generator: torch.Generator
    passes: list[Pass] = field(default_factory=list)
    noise_blocks: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # of R, between complete passes
    gram_blocks: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # of AᵀA, between actions of these
    combined: dict[int, tuple[Tensor | None, Tensor]] = field(default_factory=dict)  # complete passes, and their images
    latest: Actions | None = None
    leading: Leading | None = None  # of many classes: those that `outputs` are of

    def __post_init__(self) -> None:
        # Nothing is divided by a probability here, so none needs a floor.
        self.likelihood = self.likelihood.for_prior_variance(1e20)

    def copy(self) -> Clusters:
        """To continue with, while this one stays as it is."""
        return replace(
            self,
            passes=list(self.passes),
            noise_blocks=dict(self.noise_blocks),
            gram_blocks=dict(self.gram_blocks),
            combined=dict(self.combined),
            latest=None,
        )

    @property
    def num_directions(self) -> int:
        """How many directions have been taken so far."""
        return sum(len(done.directions) for done in self.passes)

    @property
    def last_is_random(self) -> bool:
        """Whether the last pass had random directions, since all of the likelihood's own had been taken before it."""
        return self.num_directions - len(self.passes[-1].directions) >= self.likelihood.curvature_rank

    @property
    def max_rank(self) -> int:
        """The rank of W: how many independent actions there are."""
        each = self.likelihood.curvature_rank if self.leading is None else self.leading.num_classes - 1
        return len(self.outputs) * each

    @property
    def rank(self) -> int:
        """How many actions are in the posterior."""
        return len(self.actions_now().kept)

    def curvature(self, block: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:  # (r, C) or (r, C, k)
        """W V on some data."""
        columns = block[..., None] if block.ndim == 2 else block
        return self.likelihood.curvature(self.outputs[rows], columns).reshape(block.shape)

    def outward(self, curved: Tensor, rows: Tensor) -> Tensor:  # (r, C, q)
        """W u of some data for all outputs: what is differentiated."""
        return curved if self.leading is None else self.leading.whole(curved, rows)

    def compared(self, directions: Tensor, rows: Tensor) -> Tensor:  # (r, C) -> (r, C) or (r, SKETCH)
        """W u as data are grouped by it."""
        curved = self.curvature(directions, rows)
        return curved if self.leading is None else self.leading.sketch(curved, rows)

    # --- choosing -------------------------------------------------------------------------------------------------

    def directions(self, number: int) -> Tensor:  # (q, N, C)
        """The next ones of all data."""
        return next_directions(self.likelihood, self.outputs, self.num_directions, number, self.generator)

    def new_pass(
        self,
        cotangents: int | None,
        num_actions: int,
        like: Tensor,
        num_params: int,
        *,
        max_epochs: float | None = None,
        combines: bool = True,
    ) -> Pass:
        """Group the data for the next directions, so many of each.

        `like` gives the dtype and device of the images. If `max_epochs` are not enough for all of the pass, its groups
        are the actions: there will be no combining them. Nor if `combines` is off.
        """
        number = cotangents_each(self.likelihood, cotangents, max_epochs)
        num_actions, num_kept = num_actions * (cotangents or 1), None  # in all
        num_groups = -(-num_actions // number)
        is_chosen = not self.passes and has_choice(self.likelihood, number, num_actions // number, len(self.outputs))
        if is_chosen:
            rows, directions = first_directions(self.likelihood, self.outputs, number, num_groups, self.generator)
        else:
            rows, directions = torch.arange(len(self.outputs), device=self.outputs.device), self.directions(number)
        is_enough = max_epochs is None or epochs_of(len(rows), number, len(self.outputs)) <= max_epochs + 1e-9
        if combines and is_enough and (is_chosen or (not self.passes and number * len(rows) > num_actions)):
            num_groups = groups_for(num_actions, len(rows), num_params * like.element_size(), number)
            num_kept = num_actions
        num_groups = min(num_groups, len(rows))
        weights = torch.stack([along(self.likelihood, self.outputs[rows], u) for u in directions]).sum(0)
        labels = (
            parallel.from_main(
                group(self.features[rows], self.compared(directions[0], rows), weights, num_groups, self.generator)
            )
            if num_groups > 1
            else torch.zeros_like(rows)
        )
        num_groups = int(labels.max()) + 1
        images = torch.zeros(len(directions) * num_groups, num_params, dtype=like.dtype, device=like.device)
        swept = torch.zeros(len(rows), dtype=torch.bool, device=like.device)
        checksums = torch.zeros(len(images), dtype=torch.float64, device=like.device)
        made = Pass(rows, labels, directions, images, swept, checksums, num_kept=num_kept)
        for u in directions:
            noise = self.group_noise(made, u)
            u *= torch.where(noise > 0, noise.rsqrt(), 0.0)[labels, None]
        return made

    def group_noise(self, done: Pass, u: Tensor) -> Tensor:  # (m, C) -> (B,)
        """uᵀWu of each group."""
        i, j = same_datum(done.rows, done.rows)
        together = done.labels[i] == done.labels[j]
        i, j = i[together], j[together]
        values = self._products(done.rows, u, i, u, j)
        return values.new_zeros(done.num_groups).index_add_(0, done.labels[i], values)

    # --- sweeping -------------------------------------------------------------------------------------------------

    def sweep(
        self, target: Pass, jacobian: NetworkJacobian, data: FixedOrderData, chunk_bytes: int
    ) -> Generator[int, None, None]:
        """Fill in what is missing of a pass; yields how many items were done after each batch.

        A map-style dataset is visited group by group. Data that only come in order are differentiated one by one,
        and each gradient goes to its group. Several processes go through the same batches and take turns: each has the
        gradients of its own in `images` until `finish` sums them, and after every round all have done the same number.
        """
        if not parallel.is_main():  # what is there from before is counted once
            for name in target.SUMS:
                getattr(target, name).zero_()
        curved = torch.stack([self.curvature(u, target.rows) for u in target.directions], 2)  # (m, C, q)
        target.by_group, h = data.can_jump(len(self.outputs)), checksum_vector(target.images)
        if target.by_group:
            batches = group_batches(target.labels, ~target.swept, data.batch_size)
            mine = [padded(items, data.batch_size) for items, is_mine in parallel.take_turns(batches) if is_mine]
            visited = zip(mine, data.visit([target.rows[items] for items in mine]), strict=True)
            for items, is_mine in parallel.take_turns(batches):
                if is_mine:
                    filled, (x, _) = next(visited)
                    cotangents = self.outward(curved[filled], target.rows[filled]).to(jacobian.dtype)
                    cotangents[len(items) :] = 0
                    target.add(items, jacobian.vjp(x, cotangents).T, h)  # (q, P)
                target.swept[items] = True
                yield len(items)
            return
        for (items, x), is_mine in parallel.take_turns(missing_items(data, target.rows, target.swept)):
            size = max(1, chunk_bytes // (3 * curved.shape[2] * jacobian.num_params * target.images.element_size()))
            for part in torch.arange(len(items), device=items.device).split(size) if is_mine else ():
                inputs = slice_rows(x, part, len(items))
                cotangents = self.outward(curved[items[part]], target.rows[items[part]]).to(jacobian.dtype)
                target.add(items[part], jacobian.vjp_each(inputs, cotangents), h)
            target.swept[items] = True
            yield len(items)

    def finish(self, target: Pass) -> None:
        """After a sweep, or a part of one: the sums of all processes, in each."""
        for name in target.SUMS:
            setattr(target, name, parallel.all_sum(getattr(target, name)))
        self.latest = None

    def summed(self) -> Clusters:
        """As if the current sweep were finished; it continues from what it has."""
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
        gram = block_matrix(self.noise_blocks, complete, lambda at: self._noise_block(*parts[at[0]], *parts[at[1]]))
        return 0.5 * (gram + gram.T)

    def image_gram(self) -> Tensor:  # (B, B)
        """AᵀA of the actions that are in the posterior: of the very images, as they are stored.

        After a further pass only what is new of it is computed.
        """
        found = self.actions_now()
        images, complete = [part.T for part in found.images], [done.is_complete for done in self.passes]
        gram = block_matrix(self.gram_blocks, complete, lambda at: inner_products(images[at[0]], images[at[1]]))
        return gram if len(found.kept) == len(gram) else gram[found.kept][:, found.kept]

    def rounding_gram(self) -> Tensor | None:  # (B, B)
        """The squared errors of the images, over those of one number; None where each action is a group.

        Each group's is in proportion to its own image, and combinations of groups have theirs however small they are.
        """
        found, blocks = self.actions_now(), []
        if all(best is None for best in found.combinations):
            return None
        for done, best in zip(self.passes, found.combinations, strict=True):
            parts = done.images.split(rows_at_once(len(done.images)), 1)
            lengths = sum(part.double().square().sum(1) for part in parts)
            assert isinstance(lengths, Tensor)
            blocks.append(lengths.diag() if best is None else best.T @ (lengths[:, None] * best))
        gram: Tensor = torch.block_diag(*blocks)[found.kept][:, found.kept]
        return gram

    def keep_all(self) -> None:
        """Leave each group of an unfinished pass as it is.

        What is made of all of them later might say less about some input than these do, and the variance shall only
        fall.
        """
        self.passes[-1].num_kept = self.latest = None

    def forget(self) -> None:
        """What was made of the images, which are others now; and small matrices."""
        self.gram_blocks.clear()
        self.noise_blocks.clear()
        self.combined.clear()
        self.latest = None

    def _directions(self) -> list[tuple[Pass, Tensor]]:
        return [(done, u * done.counted()[:, None]) for done in self.passes for u in done.directions]

    def _noise_block(self, left: Pass, u: Tensor, right: Pass, w: Tensor) -> Tensor:  # (B, B')
        i, j = same_datum(left.rows, right.rows)
        values = self._products(left.rows, u, i, w, j)
        total = values.new_zeros(left.num_groups * right.num_groups)
        total.index_add_(0, left.labels[i] * right.num_groups + right.labels[j], values)
        return total.view(left.num_groups, right.num_groups)

    def _products(self, rows: Tensor, u: Tensor, i: Tensor, w: Tensor, j: Tensor) -> Tensor:  # (k,)
        """u_iᵀ W w_j for places i and j of the same data, some at a time."""
        parts = zip(i.split(PRODUCTS_AT_ONCE), j.split(PRODUCTS_AT_ONCE), strict=True)
        return torch.cat([(u[a] * self.curvature(w[b], rows[a])).sum(1) for a, b in parts])

    def actions(self) -> tuple[Tensor, Tensor]:
        """A (P, B) and R (B, B) of the actions that are there and independent."""
        found = self.actions_now()
        images = found.images[0] if len(found.images) == 1 else torch.cat(found.images)
        if len(found.kept) < len(images):
            leading = len(found.kept) == 0 or int(found.kept[-1]) < len(found.kept)  # as while groups come in order
            images = images[: len(found.kept)] if leading else images[found.kept]  # no copy of leading ones
        return images.T, found.noise_gram

    def group_images(self) -> Tensor:  # (P, all groups)
        """Return the images of the groups of all passes."""
        images = [done.images for done in self.passes]
        return (images[0] if len(images) == 1 else torch.cat(images)).T

    def combinations(self) -> Tensor:  # (all groups, B)
        """Of the groups' actions, those that are in the posterior."""
        found = self.actions_now()
        pairs = zip(self.passes, found.combinations, strict=True)
        blocks = [torch.eye(len(done.images)).to(found.noise_gram) if best is None else best for done, best in pairs]
        combinations: Tensor = torch.block_diag(*blocks)
        return combinations[:, found.kept]

    def actions_now(self) -> Actions:
        """What is made of the groups as far as they have been swept; of each pass, independent or not."""
        swept = [int(done.swept.sum()) for done in self.passes]
        if self.latest is None or self.latest.swept != swept:
            gram, sizes, found = self.noise_gram(), [len(done.images) for done in self.passes], []
            for i, own in enumerate(gram.split(sizes)):
                found.append(self._combined(i, own.split(sizes, 1)[i]))
            combinations, images = map(list, zip(*found, strict=True))
            gram = combined_gram(gram, sizes, combinations)
            kept = independent_columns(gram)
            gram = gram if len(kept) == len(gram) else gram[kept][:, kept]
            self.latest = Actions(swept, combinations, images, gram, kept)
        return self.latest

    def _combined(self, index: int, noise: Tensor) -> tuple[Tensor | None, Tensor]:  # R (B_i, B_i)
        """What to keep of one pass, and its images; None: the actions of its groups, as also while they are swept."""
        done = self.passes[index]
        if done.num_kept is None or not done.is_complete:
            return None, done.images
        if index not in self.combined:
            images = done.images.T
            best = best_combinations(noise, inner_products(images, images), done.num_kept, len(done.directions))
            combined = done.images
            if best is not None:  # summed in float64, some weights at a time
                combined = combined.new_empty(best.shape[1], combined.shape[1])
                step = rows_at_once(len(done.images))
                for part, place in zip(done.images.split(step, 1), combined.split(step, 1), strict=True):
                    place.copy_(best.T @ part.double())
            self.combined[index] = best, combined
        return self.combined[index]

    def spread(self, contributions: Tensor) -> Tensor:  # (b, all groups) -> (b, N)
        """What belongs to groups, given to their data in proportion to uᵀWu, of which each action has 1 in all."""
        result, start = contributions.new_zeros(len(contributions), len(self.outputs)), 0
        for done, u in self._directions():
            part = contributions[:, start : start + done.num_groups]
            noise = (u * self.curvature(u, done.rows)).sum(1)
            size = torch.zeros(done.num_groups, dtype=noise.dtype, device=noise.device)
            size.index_add_(0, done.labels, noise)  # 1, or less for a group that is not all swept
            result.index_add_(1, done.rows, part[:, done.labels] * (noise / size[done.labels].clamp_min(1e-300)))
            start += done.num_groups
        return result
