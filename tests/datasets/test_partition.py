import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.datasets.partition import Labels, class_counts, natural, partition
from fedplat.errors import UserError

COMPLETE = {
    "iid": {"min_samples": 1},
    "dirichlet": {"min_samples": 1, "max_tries": 20},
    "dirichlet-client": {"min_samples": 1},
    "shards": {"min_samples": 1},
    "quantity": {"min_samples": 1, "max_tries": 20},
    "mud-hog": {},
}
SEEDED = [name for name in COMPLETE if name != "mud-hog"]


def view(per_class=60, classes=5, seed=0):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), per_class))
    return Labels(labels, classes, name="toy")


def text_view(groups=8, seed=0):
    sizes = np.random.default_rng(seed).integers(5, 40, groups)
    group = np.repeat(np.arange(groups), sizes)
    return Labels(np.zeros((len(group), 4), np.int64), 65, group, tuple("abcdefgh"[:groups]), "plays")


def sizes(parts):
    return np.array([len(part) for part in parts])


@pytest.mark.parametrize("scheme", COMPLETE)
@given(data=st.data())
@settings(max_examples=30, deadline=None, database=None)
def test_every_sample_goes_to_exactly_one_client(scheme, data):
    classes = data.draw(st.integers(1, 6))
    labels = np.array(data.draw(st.lists(st.integers(0, classes - 1), min_size=1, max_size=120)), np.int64)
    clients = data.draw(st.integers(1, 12))
    chosen = dict(COMPLETE[scheme])
    if "dirichlet" in scheme or scheme == "mud-hog":
        chosen["alpha"] = data.draw(st.sampled_from([0.02, 0.5, 1.0, 100.0]))
    if scheme == "dirichlet":
        chosen["balance"] = data.draw(st.booleans())
    if scheme == "shards":
        chosen["classes_per_client"] = data.draw(st.integers(1, 4))
    try:
        parts = partition(scheme, Labels(labels, classes), clients, data.draw(st.integers(0, 99)), **chosen)
    except UserError:
        return
    assert len(parts) == clients
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    for part in parts:
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()
    if scheme != "mud-hog":
        assert sizes(parts).min() >= 1


@given(st.integers(0, 8), st.integers(1, 30), st.integers(0, 99))
@settings(max_examples=40, deadline=None, database=None)
def test_natural_gives_whole_groups_and_shares_none(clients, min_samples, seed):
    plays = text_view(seed=seed)
    whole = np.bincount(plays.groups)
    fit = np.flatnonzero(whole >= min_samples)
    if clients > len(fit) or not len(fit):
        with pytest.raises(UserError, match=f"{len(fit)} of the 8 groups"):
            partition("natural", plays, clients, seed, min_samples=min_samples)
        return
    parts = partition("natural", plays, clients, seed, min_samples=min_samples)
    assert len(parts) == (clients or len(fit))
    owners = [int(plays.groups[part[0]]) for part in parts]
    assert owners == sorted(set(owners))
    for owner, part in zip(owners, parts, strict=True):
        assert part.tolist() == np.flatnonzero(plays.groups == owner).tolist()
        assert len(part) >= min_samples


@pytest.mark.parametrize("scheme", SEEDED)
def test_same_seed_same_split_and_another_seed_another(scheme):
    first, same, other = (partition(scheme, view(), 6, seed) for seed in (3, 3, 4))
    assert [p.tolist() for p in first] == [p.tolist() for p in same]
    assert [p.tolist() for p in first] != [p.tolist() for p in other]


def test_natural_draws_its_groups_by_the_seed():
    picks = {
        tuple(len(p) for p in partition("natural", text_view(), 3, seed, min_samples=1)) for seed in range(9)
    }
    assert len(picks) > 1


@pytest.mark.parametrize("scheme", COMPLETE)
def test_the_global_generator_is_neither_used_nor_moved(scheme):
    before = np.random.get_state()  # noqa: NPY002
    first = partition(scheme, view(), 6, 3)
    after = np.random.get_state()  # noqa: NPY002
    assert before[2:] == after[2:]
    np.testing.assert_array_equal(before[1], after[1])
    np.random.bytes(8)  # noqa: NPY002
    assert [p.tolist() for p in first] == [p.tolist() for p in partition(scheme, view(), 6, 3)]


@pytest.mark.parametrize("scheme", ["iid", "dirichlet-client", "shards"])
@pytest.mark.parametrize("clients", [1, 7, 29])
def test_equal_sizes_differ_by_one_at_most(scheme, clients):
    found = sizes(partition(scheme, view(), clients, 0))
    assert found.max() - found.min() <= 1


def test_iid_clients_have_about_the_same_class_mix():
    many = view(per_class=2000, classes=4)
    counts = class_counts(many.labels, partition("iid", many, 5, 0), 4)
    np.testing.assert_allclose(counts, 400, rtol=0.15)


def test_dirichlet_spreads_evenly_for_large_alpha_and_unevenly_for_small():
    many = view(per_class=1000, classes=4)
    spread = {}
    for alpha in (0.1, 1e6):
        counts = class_counts(many.labels, partition("dirichlet", many, 5, 0, alpha=alpha, min_samples=1), 4)
        assert counts.sum(axis=0).tolist() == [1000] * 4
        spread[alpha] = counts.std()
    assert spread[1e6] < 3
    assert spread[0.1] > 200


def test_dirichlet_class_shares_have_the_mean_and_variance_of_the_distribution():
    alpha, clients = 0.5, 4
    many = view(per_class=500, classes=2000)
    parts = partition("dirichlet", many, clients, 0, alpha=alpha)
    shares = class_counts(many.labels, parts, 2000) / 500
    mean = 1 / clients
    np.testing.assert_allclose(shares.mean(), mean, atol=1e-9)
    np.testing.assert_allclose(shares.var(), mean * (1 - mean) / (clients * alpha + 1), rtol=0.05)


def test_balanced_dirichlet_gives_no_new_class_to_a_client_that_has_its_share():
    many = view(per_class=300, classes=10)
    plain, balanced = (
        partition("dirichlet", many, 6, 1, alpha=0.2, balance=b, min_samples=1) for b in (False, True)
    )
    assert sizes(balanced).max() < 3000 / 6 + 300 < sizes(plain).max()


def test_dirichlet_client_mixes_follow_alpha():
    many = view(per_class=1000, classes=5)
    skew = {}
    for alpha in (0.3, 1e4):
        counts = class_counts(many.labels, partition("dirichlet-client", many, 10, 0, alpha=alpha), 5)
        assert counts.sum(axis=0).tolist() == [1000] * 5
        skew[alpha] = counts.max(axis=1).mean() / 500
    assert skew[1e4] < 0.26
    assert skew[0.3] > 0.7


def test_dirichlet_client_draws_from_the_classes_that_are_there():
    labels = np.repeat([1, 4], [30, 90])
    counts = class_counts(labels, partition("dirichlet-client", Labels(labels, 6), 4, 0), 6)
    assert counts.sum(axis=0).tolist() == [0, 30, 0, 0, 90, 0]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_shards_give_each_client_few_classes(k):
    many = view(per_class=120, classes=10)
    counts = class_counts(many.labels, partition("shards", many, 20, 0, classes_per_client=k), 10)
    assert (counts > 0).sum(axis=1).max() <= 2 * k
    assert counts.sum(axis=1).tolist() == [60] * 20


def test_shards_that_fit_the_classes_exactly_hold_one_class_each():
    many = view(per_class=60, classes=10)
    counts = class_counts(many.labels, partition("shards", many, 10, 0, classes_per_client=2), 10)
    assert set(counts.ravel()) <= {0, 30, 60}


def test_quantity_sizes_are_log_normal_and_equal_for_sigma_zero():
    labels = Labels(np.zeros(400_000, np.int64), 1)
    found = sizes(partition("quantity", labels, 2000, 0, sigma=0.8, min_samples=1))
    assert np.log(found).std() == pytest.approx(0.8, rel=0.05)
    equal = sizes(partition("quantity", labels, 7, 0, sigma=0.0))
    assert equal.max() - equal.min() <= 1


@pytest.mark.parametrize("scheme", SEEDED)
def test_what_cannot_fit_is_refused_at_once_with_the_inequality(scheme):
    with pytest.raises(UserError) as error:
        partition(scheme, view(), 40, 0, min_samples=10)
    assert "40 clients x min_samples 10 = 400 > 300 training samples" in str(error.value)
    assert "clients <= 30 or min_samples <= 7" in str(error.value)


def test_more_shards_than_samples_are_refused_by_their_own_name():
    with pytest.raises(UserError, match="10 clients x classes_per_client 40 = 400 > 300"):
        partition("shards", view(), 10, 0, classes_per_client=40)


def advice(error):
    for part in str(error.value).split("What would fit: ")[1].split(", or "):
        if " = " in part:
            name, value = part.split(" = ")
            yield name, float(value) if "." in value or name in ("alpha", "sigma") else int(value)


@pytest.mark.parametrize(
    ("scheme", "chosen", "skew"),
    [("dirichlet", {"alpha": 0.1}, "alpha"), ("quantity", {"sigma": 2.0}, "sigma")],
)
def test_draws_that_never_fit_end_and_the_advice_given_does_fit(scheme, chosen, skew):
    many = view(per_class=300, classes=10)
    with pytest.raises(
        UserError, match="in 100 draws the smallest of 100 clients never got more than"
    ) as error:
        partition(scheme, many, 100, 0, min_samples=20, **chosen)
    offers = dict(advice(error))
    assert {skew, "clients"} <= set(offers)
    for name, value in offers.items():
        changed = {"clients": 100, "min_samples": 20, **chosen, name: value}
        parts = partition(scheme, many, changed.pop("clients"), 0, **changed)
        assert sizes(parts).min() >= changed["min_samples"]


def test_max_tries_bounds_the_draws():
    with pytest.raises(UserError, match="in 3 draws"):
        partition("dirichlet", view(), 25, 0, alpha=0.05, min_samples=12, max_tries=3)


@pytest.mark.parametrize("scheme", ["dirichlet", "dirichlet-client", "shards", "mud-hog"])
def test_text_is_refused_by_schemes_that_deal_by_class(scheme):
    with pytest.raises(UserError, match="use natural, iid or quantity"):
        partition(scheme, text_view(), 3, 0)


@pytest.mark.parametrize("scheme", ["iid", "quantity", "natural"])
def test_text_is_dealt_by_the_other_schemes(scheme):
    assert len(partition(scheme, text_view(), 3, 0, min_samples=5)) == 3


def test_natural_says_so_if_there_are_no_groups():
    with pytest.raises(UserError, match="not grouped by user; use iid"):
        partition("natural", view(), None, 0)


@pytest.mark.parametrize("scheme", COMPLETE)
@pytest.mark.parametrize("clients", [None, 0, -2])
def test_a_number_of_clients_below_one_is_refused(scheme, clients):
    with pytest.raises(UserError, match="at least 1"):
        partition(scheme, view(), clients, 0)


def test_an_unknown_scheme_is_named_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'dirichlet'"):
        partition("dirichlett", view(), 3, 0)


def test_a_scheme_of_the_users_own_may_leave_samples_out_but_not_share_them():
    own = lambda view, clients, rng: [np.array([0, 1]), np.array([2])]  # noqa: E731
    assert len(partition(own, view(), 2, 0)) == 2
    for wrong, words in (
        ([np.array([0, 1]), np.array([1])], "sample 1 was given out more than once"),
        ([np.array([0, 300])], "index outside 0..299"),
        ([np.array([0.5])], "not a flat array of integers"),
        ([], "no clients"),
    ):
        with pytest.raises(UserError, match=words):
            partition(lambda view, clients, rng, wrong=wrong: wrong, view(), 2, 0)


def test_the_view_of_a_data_set_carries_its_groups_and_labels(tmp_path):
    from fedplat.datasets import digits
    from tests.datasets import source

    data = digits.load(source(tmp_path))
    seen = Labels.of(data)
    assert (len(seen), seen.num_classes, seen.groups, seen.name) == (1438, 10, None, "digits")
    counts = class_counts(seen.labels, partition("iid", seen, 4, 0), 10)
    assert counts.shape == (4, 10)
    assert counts.sum() == 1438


def test_natural_can_be_called_directly():
    plays = text_view()
    assert len(natural(plays, None, np.random.default_rng(0), min_samples=1)) == 8
