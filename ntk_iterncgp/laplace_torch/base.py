"""What the two flavours share: predictions, evidence and hyperparameters, all from a `WeightPosterior`.

laplace-torch's base class turns latent moments into probabilities and samples; this file supplies the moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from laplace.utils.enums import Likelihood, LinkApprox, PredType
from torch import Tensor

from ntk_iterncgp.clusters.clusters import Clusters
from ntk_iterncgp.data.fixed_order import Inputs, slice_rows
from ntk_iterncgp.fitting.cluster_run import ClusterState, unfolded
from ntk_iterncgp.jacobian.rows import Contrasts, DenseRows, NetworkJacobian, Rows, all_rows_are_cheap, contrasts_at
from ntk_iterncgp.laplace_torch.detector import Detecting
from ntk_iterncgp.laplace_torch.fitting import FittedNetwork
from ntk_iterncgp.laplace_torch.grid import GivenMoments, Tuning
from ntk_iterncgp.laplace_torch.hyperparameters import check_prior, follows_prior, kept_on_failure, noise_parts
from ntk_iterncgp.laplace_torch.saving import from_state_dict, to_state_dict
from ntk_iterncgp.laplace_torch.weights import WeightDistribution
from ntk_iterncgp.likelihoods import Softmax
from ntk_iterncgp.posterior.contrasts import Shape, contrasts_needed, leading_contrasts
from ntk_iterncgp.posterior.predictive import (
    KnownContrasts,
    Uncertainty,
    classification_scores,
    default_points,
    expected_response,
    in_order,
    regression_uncertainty,
)
from ntk_iterncgp.posterior.weight_space import ConditionedPosterior
from ntk_iterncgp.runtime.memory import available_bytes, mebibytes
from ntk_iterncgp.runtime.threads import evaluating, full_precision
from ntk_iterncgp.runtime.validate import checked_contrasts, one_of, whole_number

COVARIANCES = 4  # of an input, which are held at once where one is filled in or drawn from
UNASKED_BYTES = 2**28  # of covariances, up to which nobody asks how much memory there is
T = TypeVar("T")
QUADRATURE = ("quadrature", "quasi", "accurate")


class IterNCGPLaplace(Detecting, Tuning, WeightDistribution, FittedNetwork):
    """The posterior of the linearised network given all training data. Abstract; the flavours are final."""

    output_temperature: float = 1.0

    def _refresh_posterior(self) -> None:
        super()._refresh_posterior()
        check_prior(self)

    # --- predictions -------------------------------------------------------------------------------------------------

    def __call__(  # type: ignore[override]
        self,
        x: Inputs,
        pred_type: PredType | str = PredType.GP,
        joint: bool = False,
        link_approx: LinkApprox | str = LinkApprox.PROBIT,
        n_samples: int | None = None,
        *args: Any,
        contrasts: int | str = "auto",
        **kwargs: Any,
    ) -> Any:
        """Predict as laplace-torch's function-space flavours do, which see for the other arguments.

        Args:
            x: The inputs.
            pred_type: "gp", or its other name "glm": the linearised network. "nn": the network itself at sampled
                weights, which usually predicts worse; classes' probabilities, or mean and variance (b, C).
            joint: Whether to keep the covariance between inputs (regression).
            link_approx: One of laplace-torch's links, or "quadrature", the accurate one ("quasi" and "accurate" mean
                the same): the whole covariance of the outputs, by quasi-random points that are the same for all inputs.
            n_samples: Samples of "mc" (100), or points of "quadrature" (512; of more than 25 classes 128).
            contrasts: How many contrasts of the outputs of a classifier are computed at each input, of its likeliest
                class against the next ones: a number k; "all", the whole covariance; or "auto", as many as an input
                needs. The covariance of these is never below the exact one; that of the other outputs is then an
                estimate, filled in by a shape that was learnt in the fit. Regression has no contrasts.
            *args: Further arguments of laplace-torch's call.
            **kwargs: The same, by name.

        Returns:
            Class probabilities (b, C), of a classifier of T places (b, T, C); or the mean (b, C) and covariance
            (b, C, C) of a regression.
        """
        pred_type = PredType.GP if one_of("pred_type", pred_type, list(PredType)) == PredType.GLM else pred_type
        checked_contrasts(contrasts)
        is_plain = self.likelihood == Likelihood.CLASSIFICATION and pred_type == PredType.GP
        if one_of("link_approx", link_approx, [*LinkApprox, *QUADRATURE]) in QUADRATURE:
            if is_plain:
                default = default_points(self._num_classes)
                number = default if n_samples is None else whole_number("n_samples", n_samples, at_least=1)
                with full_precision(self._device):
                    return self._by_tokens(self._by_quadrature(x, number, contrasts), x)
            link_approx = LinkApprox.PROBIT  # regression has no link
        n_samples = 100 if n_samples is None else n_samples
        if pred_type == PredType.NN:
            return self._averaged(self.predictive_samples(x, pred_type, n_samples))

        call = super().__call__

        def predicted(x: Inputs) -> Any:
            known = self._with_moments(x, contrasts, joint=joint) if pred_type == PredType.GP else x
            is_bridge = link_approx in (LinkApprox.BRIDGE, LinkApprox.BRIDGE_NORM) and isinstance(known, GivenMoments)
            if is_bridge and not bool(known[1].diagonal(dim1=1, dim2=2).all()):
                raise ValueError(
                    "`link_approx` must not be 'bridge' with a single logit. Try 'probit' or 'quadrature'."
                )
            found = call(known, pred_type, joint, link_approx, n_samples, *args, **kwargs)
            return self._by_tokens(found, x)

        with full_precision(self._device):
            is_known = bool(args or kwargs) or isinstance(x, GivenMoments)  # to laplace-torch alone
            if is_plain and link_approx == LinkApprox.PROBIT and not is_known:
                return self._by_tokens(self._by_probit(x, contrasts), x)
            return self._in_batches(x, predicted, 0) if is_plain and not joint else predicted(x)

    def _by_tokens(self, values: Any, x: Inputs, dim: int = 0) -> Any:
        """What was computed for each place of the inputs, by input: (b·T, …) -> (b, T, …)."""
        is_of_tokens = self._num_tokens > 1 and isinstance(values, Tensor) and not isinstance(x, GivenMoments)
        return values.unflatten(dim, (self._num_inputs(x), -1)) if is_of_tokens else values

    def _glm_forward_call(
        self,
        x: Inputs,
        likelihood: Likelihood | str,
        joint: bool = False,
        link_approx: LinkApprox | str = LinkApprox.PROBIT,
        n_samples: int = 100,
        diagonal_output: bool = False,
    ) -> Any:
        if link_approx in QUADRATURE:
            return self._by_quadrature(x, n_samples, "auto")
        return super()._glm_forward_call(x, likelihood, joint, link_approx, n_samples, diagonal_output)

    def _by_quadrature(self, x: Inputs, num_points: int, contrasts: int | str) -> Tensor:  # (b, C)
        softmax = Softmax(self._num_classes)

        def averaged(mean: Tensor, covariance: Tensor) -> Tensor:
            wide = torch.promote_types(mean.dtype, torch.float32)  # no eigenvalues in half precision
            response = expected_response(
                softmax, mean.to(wide), covariance.to(wide), link="quadrature", num_samples=num_points
            )
            return response.to(mean.dtype)

        if isinstance(x, GivenMoments):
            return averaged(*x)
        self._check_fitted()
        self._check_nonempty_inputs(x)
        if self._takes_few(contrasts):
            parts, shape = self._known(x, contrasts, link="quadrature")
            found = [part.probabilities(shape, num_points) for part in parts]
            return in_order(parts, found).to(self._dtype)
        # It depends on differences between the outputs alone: one backward pass less.
        needed = softmax.contrasts(self._device) if self._num_tokens == 1 else None
        return torch.cat(self._of_moments(x, averaged, needed))

    def _by_probit(self, x: Inputs, contrasts: int | str) -> Tensor:  # (b, C)
        """From variances alone: a matrix of C×C numbers for each input is not formed where few contrasts are known."""
        self._check_fitted()
        self._check_nonempty_inputs(x)
        if self._takes_few(contrasts):
            parts, shape = self._known(x, contrasts, link="probit")
            return in_order(parts, [part.by_probit(shape) for part in parts]).to(self._dtype)
        link = partial(self._glm_forward_call, likelihood=self.likelihood)  # laplace-torch's own
        return torch.cat(self._of_moments(x, lambda *moments: link(GivenMoments(*moments))))

    def functional_samples(
        self,
        x: Inputs,
        pred_type: PredType | str = PredType.GLM,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        joint: bool = False,
        *,
        contrasts: int | str = "auto",
    ) -> Tensor:  # (n_samples, b, C)
        """Draw outputs, as laplace-torch does; `contrasts` as in a prediction."""
        if pred_type == PredType.NN:
            return self._split_tokens(self._at_sampled_weights(x, n_samples, generator))

        draw = super().functional_samples

        def drawn(x: Inputs) -> Tensor:
            known = self._with_moments(x, contrasts, joint=joint)
            found = draw(known, pred_type, n_samples, diagonal_output, generator, joint)
            samples: Tensor = self._by_tokens(found, x, 1)
            return samples

        samples: Tensor = drawn(x) if joint else self._in_batches(x, drawn, 1)
        return samples

    def predictive_samples(
        self,
        x: Inputs,
        pred_type: PredType | str = PredType.GLM,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        fitting: bool = False,
        joint: bool = False,
        *,
        contrasts: int | str = "auto",
    ) -> Tensor:  # (n_samples, b, C)
        """Draw class probabilities, or outputs of a regression; `contrasts` as in a prediction."""
        if pred_type == PredType.NN:
            draws = self._split_tokens(self._at_sampled_weights(x, n_samples, generator))
            return draws.softmax(-1) if self.likelihood == Likelihood.CLASSIFICATION else draws
        if self.likelihood == Likelihood.CLASSIFICATION:  # laplace-torch draws outputs, too
            latent = self.functional_samples(
                x, pred_type, n_samples, diagonal_output, generator, joint, contrasts=contrasts
            )
            return latent.softmax(-1)
        found: Tensor = super().predictive_samples(x, pred_type, n_samples, diagonal_output, generator, fitting, joint)
        return found

    def _in_batches(self, x: Inputs, function: Callable[[Inputs], Any], dim: int) -> Any:
        """Apply a function that takes C×C numbers for each input to as many at a time as fit in `chunk_bytes`."""
        self._check_fitted()
        size = max(1, self.settings.chunk_bytes // (COVARIANCES * 8 * self.n_outputs * self._num_classes))
        if isinstance(x, GivenMoments) or self._num_inputs(x) <= size:
            return function(x)
        total = self._num_inputs(x)
        starts = range(0, total, size)
        parts = [function(slice_rows(x, slice(start, min(start + size, total)), total)) for start in starts]
        return torch.cat(parts, dim)

    def _with_moments(self, x: Inputs, contrasts: int | str, *, joint: bool) -> Inputs:
        """For a classifier its latent moments in the place of inputs, for laplace-torch to go on from."""
        checked_contrasts(contrasts)
        if self.likelihood != Likelihood.CLASSIFICATION or joint or isinstance(x, GivenMoments):
            return x
        self._check_fitted()
        self._check_nonempty_inputs(x)
        return GivenMoments(*self._moments(x, contrasts))

    def _check_nonempty_inputs(self, x: Inputs) -> None:
        if not isinstance(x, GivenMoments):
            super()._check_nonempty_inputs(x)

    def uncertainty(self, x: Inputs, *, contrasts: int | str = "auto") -> Uncertainty:
        """Score each input for rejection, out-of-distribution detection and active learning.

        Args:
            x: The inputs.
            contrasts: As in a prediction. The margin's variance is exact with any; the other scores are estimates
                where not all contrasts are computed.

        Returns:
            The scores, which print as a table; of a classifier of T places those of the first input's, and so on.
        """
        checked_contrasts(contrasts)
        if self.likelihood == Likelihood.CLASSIFICATION:
            return self._scored(x, contrasts)[2]
        _, covariance = self.predictive_moments(x)
        return regression_uncertainty(covariance.double(), self.sigma_noise.detach().double().square())

    def _scored(
        self, x: Inputs, contrasts: int | str, num_points: int | None = None
    ) -> tuple[Tensor, Tensor, Uncertainty]:
        """Of a classifier the probabilities (b, C) by probit and by quadrature, and the scores of each input."""
        self._check_fitted()
        self._check_nonempty_inputs(x)
        C = self._num_classes
        softmax, number = Softmax(C), num_points or default_points(C)

        def scored(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor, Uncertainty]:
            mean, covariance = mean.double(), covariance.double()
            by_probit = softmax.expected_response(mean, covariance.diagonal(dim1=1, dim2=2))
            return by_probit, *classification_scores(mean, covariance, number)

        def join(values: list[Tensor]) -> Tensor:
            return in_order(parts, values) if parts else torch.cat(values)

        parts: list[KnownContrasts] = []
        with full_precision(self._device):
            if self._takes_few(contrasts):
                parts, shape = self._known(x, contrasts)
                found = [(part.by_probit(shape), *part.scored(shape, number)) for part in parts]
            else:
                found = self._of_moments(x, scored)
        by_probit, by_points, scores = zip(*found, strict=True)
        return join(list(by_probit)), join(list(by_points)), Uncertainty.joined(scores, join)

    def attribution(self, x: Inputs) -> Tensor:  # (b, N)
        """How much each training datum reduced the variance (the trace over outputs) at each input.

        The share of a group is spread over its data by how much each contributed to it. The rows sum to the prior
        variance less the posterior variance. For policy="clusters", after a fit in this process.
        """
        self._check_fitted()
        self._check_nonempty_inputs(x)
        self._refresh_posterior()
        if (clusters := self._clusters_now()) is None:
            raise RuntimeError(
                "attribution must follow a fit with policy='clusters' in this process, whose groups are known; got an "
                "exact, loaded, compressed, updated or merged one. Try policy='clusters' and fit(train_loader)."
            )
        posterior = unfolded(self.posterior, clusters).conditioned(self.prior_precision, self._noise_scale)
        groups, combinations = clusters.group_images(), clusters.combinations()
        with evaluating(self.model), torch.no_grad():  # rows wait for other threads, products need not
            parts = [posterior.contributions(rows, groups, combinations) for rows in self._rows_at(x)]
        return clusters.spread(torch.cat(parts))  # (b, all groups) -> (b, N)

    def _clusters_now(self) -> Clusters | None:
        """The groups that the actions of this very posterior are made of, if they are known."""
        fit = self._fit
        state = None if fit is None or fit.posterior is not self.posterior else fit.state
        clusters = state.clusters if isinstance(state, ClusterState) else None
        return None if clusters is None or self.posterior.rank != min(clusters.rank, len(self.mean)) else clusters

    def latent(
        self, x: Inputs, *, joint: bool = False, contrasts: int | str = "auto"
    ) -> tuple[Tensor, Tensor]:  # (b, C), (b, C, C)
        """Compute the posterior of the network's outputs.

        Args:
            x: The inputs.
            joint: Whether to return the covariance between all inputs too, (b·C, b·C), with the output index fastest.
            contrasts: As in a prediction; a joint covariance always has all.

        Returns:
            The mean (b, C) and the covariance (b, C, C) of the outputs; of a classifier of T places (b, T, C) and
            (b, T, C, C), and the joint ones of all b·T·C outputs.
        """
        self._check_fitted()
        self._check_nonempty_inputs(x)
        self._refresh_posterior()
        with full_precision(self._device):
            if not joint:
                mean, covariance = self._moments(x, checked_contrasts(contrasts))
                return self._by_tokens(mean, x), self._by_tokens(covariance, x)
            mean, covariance = self._glm_predictive_distribution(x, joint=True)
        return mean.reshape(-1, self.n_outputs), covariance

    def _glm_predictive_distribution(self, x: Inputs, joint: bool = False) -> tuple[Tensor, Tensor]:
        if isinstance(x, GivenMoments):  # moments known already: laplace-torch's links are asked about them
            return x
        if not joint:
            return self._moments(x)
        posterior = self._posterior_now()
        with evaluating(self.model), self._gradients():
            rows = self._all_rows_at(x)
            mean, covariance = self._mean_of(rows, posterior).flatten(), posterior.covariance(rows, joint=True)
        return self._tempered(mean.to(self._dtype), covariance.to(self._dtype))

    def _moments(self, x: Inputs, contrasts: int | str = "auto") -> tuple[Tensor, Tensor]:
        """Mean (b, C) and covariance (b, C, C) of the outputs over the output temperature."""
        self._check_covariances_fit(x)
        if not self._takes_few(contrasts):
            return self._whole_moments(x)
        parts, shape = self._known(x, contrasts)
        mean = in_order(parts, [part.outputs for part in parts])
        b, C = mean.shape
        covariance = mean.new_empty(b, C, C, dtype=self._dtype)
        size = max(1, self.settings.chunk_bytes // (COVARIANCES * 8 * C * C))
        for part in parts:
            for piece in part.split(size):
                covariance[piece.where] = piece.filled(shape).to(self._dtype)
        return mean.to(self._dtype), covariance

    def _check_covariances_fit(self, x: Inputs) -> None:
        """Refuse what takes C×C numbers for more inputs than fit in memory, before anything is computed."""
        b, C = self._num_inputs(x) * self._num_tokens, self._num_classes
        each = 2 * self._dtype.itemsize * C * C  # the parts, and all as one
        available = available_bytes(self._device) if b * each > UNASKED_BYTES else None
        if available is not None and b * each > available:
            raise MemoryError(
                f"`x` must hold at most {available // each:,} inputs, whose covariances of {C:,} outputs take the "
                f"memory available, {mebibytes(available)}; got {b:,} inputs, {mebibytes(b * each)}. Try smaller "
                "batches, or la(x) and la.uncertainty(x), which hold no such matrices."
            )

    def _whole_moments(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean and the covariance from all rows."""
        mean, covariance = map(torch.cat, zip(*self._of_moments(x, lambda *moments: moments), strict=True))
        return mean, covariance

    def _of_moments(
        self, x: Inputs, function: Callable[[Tensor, Tensor], T], contrasts: Tensor | None = None
    ) -> list[T]:
        """A function of the mean (b, C) and the covariance (b, C, C) from all rows, some inputs at a time.

        For contrasts H (C, r), the covariance (b, r, r) of Hᵀf, and the mean up to what is the same for all outputs.
        """
        posterior, C = self._posterior_now(), self._num_classes

        def found(rows: Rows) -> T:
            mean, covariance = self._mean_of(rows, posterior, contrasts), posterior.covariance(rows)
            if self._num_tokens > 1:  # each place by itself
                blocks = covariance.unflatten(2, (-1, C)).unflatten(1, (-1, C)).diagonal(dim1=1, dim2=3)  # (b, C, C, T)
                mean, covariance = mean.reshape(-1, C), blocks.movedim(3, 1).reshape(-1, C, C)
            return function(*self._tempered(mean.to(self._dtype), covariance.to(self._dtype)))

        with evaluating(self.model), self._gradients():
            # By `map`, no name holds the rows of one part while those of the next are computed.
            return list(map(found, self._rows_at(x, contrasts)))

    def _takes_few(self, contrasts: int | str) -> bool:
        """Whether fewer contrasts than all are asked for.

        Not where the mean moves with the weights, which takes all rows, nor by "auto" where all cost next to nothing or
        no shape was learnt.
        """
        C = self.n_outputs
        is_whole = self.settings.mean == "refined" or self._num_tokens > 1
        if self.likelihood != Likelihood.CLASSIFICATION or C <= 2 or is_whole:
            return False
        if isinstance(contrasts, int):
            return contrasts < C - 1
        may_be_few = contrasts == "auto" and not all_rows_are_cheap(C, len(self.mean))
        return may_be_few and self.posterior.reference is not None

    def _known(self, x: Inputs, contrasts: int | str, *, link: str | None = None) -> tuple[list[KnownContrasts], Shape]:
        """The covariance of the leading contrasts at each input, and the shape of the others.

        Of "auto" at least one, but for probabilities by a `link` where that is as good as certain without: then it is
        the covariance expected at a typical input.
        """
        posterior = self._posterior_now()
        shape = posterior.shape or Shape.independent(self.n_outputs, self._device)
        parts = []
        with evaluating(self.model), self._gradients():
            jacobian, inputs = self._jacobian_at(x)
            number: int | Tensor
            if isinstance(contrasts, int):
                number = contrasts
            else:
                expected = self._expected(jacobian, inputs, shape)
                number = expected.more_needed(shape)
                if link is None or not shape.is_typical:
                    number = number.clamp_min(1)
                elif link == "probit":  # which makes more of the same variance
                    number = number.where(contrasts_needed(expected.by_probit(shape)) == 0, number.clamp_min(1))
                parts.append(expected.at((number == 0).nonzero()[:, 0]))
            for where, rows in self._rows_of_few(jacobian, inputs, number):
                known = self._tempered(rows.outputs.double(), posterior.covariance(rows))
                parts.append(KnownContrasts(where, *known))
        return [part for part in parts if len(part.where)], shape

    def _expected(self, jacobian: NetworkJacobian, inputs: Inputs, shape: Shape) -> KnownContrasts:
        """What is expected before any contrast is known: the outputs, and the variance of a typical margin."""
        outputs = self._outputs_of(jacobian, inputs).double()
        everywhere = torch.arange(len(outputs), device=self._device)
        return KnownContrasts(everywhere, *self._tempered(outputs, torch.full_like(outputs[:, :1, None], shape.margin)))

    def _rows_of_few(
        self, jacobian: NetworkJacobian, inputs: Inputs, number: int | Tensor
    ) -> Iterator[tuple[Tensor, Rows]]:  # (b,), and rows at these inputs
        """The rows of as many leading contrasts at all inputs, or of one number after the other if each has its own."""
        everywhere = torch.arange(self._num_inputs(inputs), device=self._device)
        if isinstance(number, int):
            groups = {number: everywhere}
        else:
            groups = {k: everywhere[number == k] for k in number.unique().tolist() if k}
        for k, where in groups.items():
            some = inputs if len(where) == len(everywhere) else slice_rows(inputs, where, len(everywhere))
            start, of_these = 0, partial(leading_contrasts, number=k)
            for rows in jacobian.rows_in_parts(some, len(where), of_these, k, self.settings.chunk_bytes):
                yield where[start : start + len(rows.outputs)], rows
                start += len(rows.outputs)

    def _outputs_of(self, jacobian: NetworkJacobian, inputs: Inputs) -> Tensor:  # (b, C)
        """The network's outputs alone."""
        num_inputs = self._num_inputs(inputs)
        parts = jacobian.parts(inputs, num_inputs, 1, self.settings.chunk_bytes)
        return torch.cat([jacobian.forward(slice_rows(inputs, part, num_inputs)) for part in parts])

    def _num_inputs(self, inputs: Inputs) -> int:
        return len(inputs[self.dict_key_x] if isinstance(inputs, Mapping) else inputs)

    def _rows_at(self, x: Inputs, contrasts: Contrasts | None = None) -> Iterator[Rows]:
        """The network at new inputs, in parts that fit in `chunk_bytes`: J(x), or HᵀJ(x) for contrasts H."""
        jacobian, inputs = self._jacobian_at(x)
        num_inputs, C = self._num_inputs(inputs), self.n_outputs
        number = C if contrasts is None else contrasts_at(contrasts, self.mean.new_zeros(num_inputs, C)).shape[-1]
        return jacobian.rows_in_parts(inputs, num_inputs, contrasts, number, self.settings.chunk_bytes)

    def _all_rows_at(self, x: Inputs) -> Rows:
        parts = list(self._rows_at(x))
        if len(parts) > 1:
            raise ValueError(
                f"A joint prediction must fit in chunk_bytes at once; got {len(parts)} parts of "
                f"{self.settings.chunk_bytes / 2**20:.0f} MiB. Try larger chunk_bytes, or fewer inputs."
            )
        return parts[0]

    def _mean_of(self, rows: Rows, posterior: ConditionedPosterior, contrasts: Tensor | None = None) -> Tensor:
        if self.settings.mean == "network":
            return rows.outputs.double()
        shift = self._mean_weights(posterior) - self.mean.double()  # μ − θ*
        moved = rows.times(shift[:, None])[..., 0]
        return rows.outputs.double() + (moved if contrasts is None else moved @ contrasts.T)

    def _tempered(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """The moments of f/T."""
        T: Any = self.output_temperature
        return (mean, covariance) if T == 1 else (mean / T, covariance / T**2)

    def functional_variance(self, Js: Tensor, *, joint: bool = False) -> Tensor:  # (b, C, P) -> (b, C, C)
        """J Σ Jᵀ for given rows of the Jacobian."""
        self._check_fitted()
        self._check_jacobians(Js)
        return self._posterior_now().covariance(DenseRows(Js[..., 0], Js), joint=joint).to(Js.dtype)

    def functional_covariance(self, Js: Tensor) -> Tensor:  # (b, C, P) -> (b·C, b·C)
        """The joint covariance for given rows of the Jacobian."""
        return self.functional_variance(Js, joint=True)

    # --- evidence and hyperparameters --------------------------------------------------------------------------------

    def log_marginal_likelihood(
        self, prior_precision: Tensor | None = None, sigma_noise: Tensor | None = None
    ) -> Tensor:
        """A lower bound on the Laplace evidence, equal to it with enough actions; differentiable in both arguments.

        Of a refined regression with few actions it is a bound at the prior of the fit: at others, what the actions miss
        of the misfit is taken from there.
        """
        self._check_fitted()
        with kept_on_failure(self, "prior_precision", "sigma_noise"):
            if prior_precision is not None:
                self.prior_precision = prior_precision
            if sigma_noise is not None:
                self.sigma_noise = sigma_noise
            check_prior(self)
        return self._log_likelihood_of_fit - 0.5 * (self.log_det_ratio + self._misfit())

    def _misfit(self) -> Tensor:
        """Return what the evidence charges the mean, beside the loss of the fit.

        The prior's penalty of the weights; or, where the mean moves with the prior, bᵀ(K + W⁺)⁻¹b in the span of the
        actions: what it has beyond is at most ‖r‖²/τ, for the residual r of the fit, which is the loss. At a
        classifier's mode the penalty is the same number less ∇ᵀW⁺∇, which may be of any size where data are saturated.
        """
        if self.settings.mean == "network" or not follows_prior(self):
            return self.scatter
        right_hand_side = self.posterior.right_hand_side_for(self.prior_mean)[:, None]
        factor = self.posterior.factor(self.prior_precision, self._noise_scale)
        return factor.half_solve(right_hand_side).square().sum().to(self._dtype)

    def _glm_functional_samples(
        self, f_mu: Tensor, f_var: Tensor, n_samples: int, diagonal_output: bool = False, generator: Any = None
    ) -> Tensor:
        """In single precision at least: there is no Cholesky factorisation in half precision."""
        dtype = torch.promote_types(f_mu.dtype, torch.float32)
        draws = super()._glm_functional_samples(f_mu.to(dtype), f_var.to(dtype), n_samples, diagonal_output, generator)
        return draws.to(f_mu.dtype)

    @property
    def log_likelihood(self) -> Tensor:
        """log p(y | f) of the training data, at the predictive mean."""
        self._check_fitted()
        return self._log_likelihood_of_fit - 0.5 * (self._misfit() - self.scatter)

    @property
    def _log_likelihood_of_fit(self) -> Tensor:
        """laplace-torch's, of which a regression may have a noise for each output."""
        if self.likelihood != Likelihood.REGRESSION:
            return super().log_likelihood
        constant = 0.5 * self.n_data * self.n_outputs * (2 * math.pi * noise_parts(self.sigma_noise)[0]).log()
        return (-self.loss / self._noise_scale - constant).to(self._dtype)

    @property
    def log_det_ratio(self) -> Tensor:
        """An upper bound on log|I + W^{½}KW^{½}|, so that the evidence is safe to maximise."""
        self._check_fitted()
        return self.posterior.log_determinant_bounds(self.prior_precision, self._noise_scale)[1].to(self._dtype)

    @property
    def scatter(self) -> Tensor:
        """The prior's penalty of the mean weights."""
        self._check_fitted()
        if self.settings.mean == "refined":
            delta = self._mean_weights(self._posterior_now()).to(self._dtype) - self.prior_mean
        else:
            delta = self.mean - self.prior_mean
        return (delta * self.prior_precision_diag) @ delta

    # --- saving ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors, numbers and strings: loads with `torch.load(..., weights_only=True)`."""
        self._check_fitted()
        return to_state_dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a saved posterior, after checking that it belongs to this model."""
        from_state_dict(self, state_dict)
