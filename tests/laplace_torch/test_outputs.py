"""Classifiers whose outputs are not one vector of logits: a single logit, and logits at each token of a text."""

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ntk_iterncgp  # noqa: F401  registers the flavours
from tests import oracles

NUM_DATA, TOKENS, WORDS, CLASSES = 12, 4, 6, 3
LINKS = ["probit", "quadrature", "mc"]


def exact_variance(outputs: Tensor, weights: list[Tensor], likelihood: str) -> Tensor:
    """Of the linearised network at unit prior precision, by plain autograd and a dense inverse."""
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(f, weights, retain_graph=True)]) for f in outputs.flatten()
    ]
    J = torch.stack(rows).double()
    f = outputs.detach().double()
    return oracles.posterior_at(likelihood, f, J @ J.T, J @ J.T, J @ J.T).diagonal().reshape(f.shape)


# --- one logit ------------------------------------------------------------------------------------------------------


@pytest.fixture
def binary() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).eval()
    x = torch.randn(NUM_DATA, 3)
    return model, x, (x[:, :1] > 0).float()  # targets as `BCEWithLogitsLoss` takes them


@pytest.mark.parametrize("policy", ["auto", "clusters"])  # which is exact here, and groups with all actions
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_a_network_with_one_logit_has_the_exact_posterior_of_a_bernoulli(
    subset: str, policy: str, binary: tuple[nn.Module, Tensor, Tensor]
) -> None:
    model, x, y = binary
    la = Laplace(model, "classification", subset, "iterncgp", num_actions=40, policy=policy)
    la.fit(DataLoader(TensorDataset(x, y), batch_size=5))
    weights = list((model if subset == "all" else model[2]).parameters())
    outputs = model(x)
    mean, covariance = la.latent(x)
    torch.testing.assert_close(mean, torch.cat([torch.zeros_like(outputs), outputs.detach()], 1))
    expected = exact_variance(outputs, weights, "bernoulli")
    torch.testing.assert_close(covariance[:, 1, 1].double(), expected[:, 0], rtol=1e-3, atol=1e-6)
    for link in LINKS:
        probabilities = la(x, link_approx=link, n_samples=512)
        torch.testing.assert_close(probabilities.sum(1), torch.ones(NUM_DATA))
    with pytest.raises(ValueError, match="Try 'probit'"):
        la(x, link_approx="bridge")
    kappa = (1 + torch.pi / 8 * expected).rsqrt()
    torch.testing.assert_close(
        la(x)[:, 1:].double(), torch.sigmoid(kappa * outputs.detach().double()), rtol=1e-4, atol=1e-5
    )
    la.optimize_prior_precision(method="gridsearch", val_loader=DataLoader(TensorDataset(x, y), 5), grid_size=3)
    again = Laplace(model, "classification", subset, "iterncgp")
    again.load_state_dict(la.state_dict())
    torch.testing.assert_close(again(x), la(x))


# --- tokens -----------------------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """Each token sees the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        h = self.words(input_ids) * attention_mask[..., None]
        return self.head(torch.tanh(h + h.mean(1, keepdim=True)))


class Texts(Dataset):
    """Padded texts, with a label for each of their tokens and -100 for the padding."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.mask = (torch.arange(TOKENS) < torch.randint(2, TOKENS + 1, (NUM_DATA, 1), generator=generator)).long()
        self.ids = torch.randint(1, WORDS, (NUM_DATA, TOKENS), generator=generator) * self.mask
        self.labels = torch.where(self.mask == 1, self.ids % CLASSES, -100)

    def __len__(self) -> int:
        return NUM_DATA

    def __getitem__(self, n: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[n], "attention_mask": self.mask[n], "labels": self.labels[n]}


@pytest.fixture(scope="module")
def tagged() -> tuple[Tagger, Texts, Laplace]:
    torch.manual_seed(0)
    model, data = Tagger().eval(), Texts()
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=200, policy="clusters")
    la.fit(DataLoader(data, batch_size=5))
    la.refine(DataLoader(data, batch_size=5), epochs=20)  # a pass has up to four directions of a text
    return model, data, la


def test_a_tagger_has_the_exact_posterior_given_its_labelled_tokens(tagged: tuple[Tagger, Texts, Laplace]) -> None:
    model, data, la = tagged
    outputs = model(data.ids, data.mask)  # (N, T, C)
    labelled, weights = data.labels.flatten() != -100, list(model.parameters())
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(f, weights, retain_graph=True)]) for f in outputs.flatten()
    ]
    J = torch.stack(rows).double()
    p = outputs.detach().double().softmax(2).flatten(0, 1)
    W = torch.block_diag(*((torch.diag(q) - torch.outer(q, q)) * s for q, s in zip(p, labelled.double(), strict=True)))
    covariance = J @ torch.linalg.inv(torch.eye(J.shape[1]).double() + J.T @ W @ J) @ J.T
    expected = covariance.diagonal().reshape(outputs.shape)
    batch = {"input_ids": data.ids, "attention_mask": data.mask}
    mean, found = la.latent({**batch, "labels": data.labels})  # labels of new texts change nothing
    torch.testing.assert_close(mean, outputs.detach())
    ratio = found.diagonal(dim1=2, dim2=3).double() / expected
    assert ratio.min() >= 1 - 1e-3 and ratio.max() <= 1.01
    for link in LINKS:
        probabilities = la(batch, link_approx=link, n_samples=512)
        assert probabilities.shape == (NUM_DATA, TOKENS, CLASSES)
        torch.testing.assert_close(probabilities.sum(2), torch.ones(NUM_DATA, TOKENS))
    short = {name: value[:, :2] for name, value in batch.items()}
    assert la(short).shape == (NUM_DATA, 2, CLASSES)
    assert la.predictive_samples(batch, n_samples=7).shape == (7, NUM_DATA, TOKENS, CLASSES)
    assert len(la.uncertainty(batch)) == NUM_DATA * TOKENS


def test_one_pass_over_texts_is_never_below_the_exact_variance(tagged: tuple[Tagger, Texts, Laplace]) -> None:
    model, data, converged = tagged
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=8, policy="clusters")
    la.fit(DataLoader(data, batch_size=5))
    batch = {"input_ids": data.ids, "attention_mask": data.mask}
    few, many = (each.latent(batch)[1].diagonal(dim1=2, dim2=3) for each in (la, converged))
    assert (few >= many * (1 - 1e-3)).all() and few.sum() < 0.8 * (few + 1).sum()
    la.optimize_prior_precision(n_steps=5)
    again = Laplace(model, "classification", "all", "iterncgp")
    again.load_state_dict(la.state_dict())
    torch.testing.assert_close(again(batch), la(batch))


def test_texts_of_several_lengths_must_be_padded_to_one(tagged: tuple[Tagger, Texts, Laplace]) -> None:
    model, data, _ = tagged
    items = [data[n] for n in range(4)]
    batches = [torch.utils.data.default_collate(items), {k: v[None, :2] for k, v in items[0].items()}]
    with pytest.raises(ValueError, match="padding='max_length'"):
        Laplace(model, "classification", "all", "iterncgp").fit(batches)


def test_what_needs_one_label_for_each_input_says_so(tagged: tuple[Tagger, Texts, Laplace]) -> None:
    model, data, la = tagged
    with pytest.raises(ValueError, match="method='marglik'"):
        la.optimize_prior_precision(method="gridsearch", val_loader=DataLoader(data, 5), grid_size=3)
    with pytest.raises(ValueError, match="subset_of_weights='all'"):
        Laplace(model, "classification", "last_layer", "iterncgp").fit(DataLoader(data, 5))
    with pytest.raises(ValueError, match=r"-100 for none; got \(12,\)"):
        wrong = [{**b, "labels": b["labels"][:, 0]} for b in DataLoader(data, 5)]
        Laplace(model, "classification", "all", "iterncgp").fit(wrong)


def test_ignored_labels_of_plain_pairs_are_refused_since_their_outputs_would_count() -> None:
    model, x = nn.Linear(2, CLASSES), torch.randn(5, TOKENS, 2, generator=torch.Generator().manual_seed(0))
    y = torch.arange(5 * TOKENS).reshape(5, TOKENS) % CLASSES
    la = Laplace(model, "classification", "all", "iterncgp")
    la.fit(DataLoader(TensorDataset(x, y), 5))
    assert la(x).shape == (5, TOKENS, CLASSES)
    with pytest.raises(ValueError, match="dict_key_x='input'"):
        la.fit(DataLoader(TensorDataset(x, y.index_fill(1, torch.tensor([0]), -100)), 5))


def test_a_layer_used_twice_keeps_its_weights_where_derivatives_are_in_another_dtype() -> None:
    torch.manual_seed(0)
    inner = nn.Linear(3, 3)
    model, x = nn.Sequential(inner, nn.Tanh(), inner, nn.Tanh(), nn.Linear(3, CLASSES)).eval(), torch.randn(NUM_DATA, 3)
    before = [(p, p.detach().clone()) for p in model.parameters()]
    la = Laplace(model, "classification", "all", "iterncgp", dtype=torch.float64)
    la.fit(DataLoader(TensorDataset(x, torch.arange(NUM_DATA) % CLASSES), 5))
    la(x)
    pairs = zip(before, model.parameters(), strict=True)
    assert all(now is then and now.dtype == torch.float32 and torch.equal(now, value) for (then, value), now in pairs)


# --- soft labels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mean", ["network", "refined"])
def test_probabilities_as_targets_are_as_labels_where_they_are_sure(mean: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, CLASSES)).eval(), torch.randn(NUM_DATA, 3)
    y = torch.arange(NUM_DATA) % CLASSES
    sure = nn.functional.one_hot(y, CLASSES).float()

    def fitted(targets: Tensor) -> Laplace:
        la = Laplace(model, "classification", "all", "iterncgp", num_actions=24, mean=mean)
        la.fit(DataLoader(TensorDataset(x, targets), 5))
        return la

    hard, soft, mixed = fitted(y), fitted(sure), fitted(0.7 * sure + 0.1)
    torch.testing.assert_close(soft.latent(x), hard.latent(x))
    torch.testing.assert_close(soft.log_marginal_likelihood(), hard.log_marginal_likelihood())
    log_p = model(x).detach().log_softmax(1)
    if mean == "network":  # W does not depend on the targets, the loss does
        torch.testing.assert_close(mixed.latent(x), hard.latent(x))
        assert float(mixed.loss) == pytest.approx(-float(((0.7 * sure + 0.1) * log_p).sum()), rel=1e-4)
    else:
        assert (mixed.latent(x)[0] - hard.latent(x)[0]).abs().max() > 1e-3
    with pytest.raises(ValueError, match="sum to one in each row"):
        fitted(0.5 * sure)
    with pytest.raises(ValueError, match="Try their likeliest class" if mean == "network" else "refined"):
        soft.calibrate(DataLoader(TensorDataset(x, sure), 5))
