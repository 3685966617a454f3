import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_recurrent.data.document_order import DocumentOrder, hash_integers


@given(n=st.integers(1, 700), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 10**6))
def test_every_epoch_is_a_permutation(n, seed, epoch):
    documents = DocumentOrder(n, seed)(np.arange(epoch * n, (epoch + 1) * n))
    assert sorted(documents.tolist()) == list(range(n))


def test_any_place_is_found_directly():
    order = DocumentOrder(1000, 3)
    together = order(np.arange(5000))
    assert [int(order(np.array(place))) for place in range(0, 5000, 137)] == together[::137].tolist()
    assert (order(np.arange(6).reshape(2, 3)) == together[:6].reshape(2, 3)).all()


def test_seeds_and_epochs_give_different_orders():
    first, second = DocumentOrder(1000, 0)(np.arange(2000)).reshape(2, 1000)
    other = DocumentOrder(1000, 1)(np.arange(1000))
    # Two independent random permutations agree at one place on average.
    assert (first == second).sum() < 10
    assert (first == other).sum() < 10
    assert (first == np.arange(1000)).sum() < 10


@pytest.mark.parametrize("n", [2, 3, 5, 8, 13])
def test_every_document_comes_first_equally_often(n):
    firsts = DocumentOrder(n, 0)(np.arange(4000) * n)
    counts = np.bincount(firsts, minlength=n)
    expected = 4000 / n
    assert ((counts - expected) ** 2 / expected).sum() < n + 6 * np.sqrt(2 * n)  # chi-squared, six deviations


def test_a_very_large_number_of_documents_needs_no_table():
    n = 10**12
    documents = DocumentOrder(n, 0)(np.arange(1000))
    assert documents.min() >= 0 and documents.max() < n and len(set(documents.tolist())) == 1000
    assert abs(documents.mean() / n - 0.5) < 0.05


def test_hash_is_the_same_on_every_platform():
    assert hash_integers(0, np.arange(2)).tolist() == hash_integers(0, [0, 1]).tolist()
    assert DocumentOrder(10, 0)(np.arange(10)).tolist() == [1, 6, 4, 8, 3, 0, 9, 2, 7, 5]
    assert hash_integers(1, 2, 3).tolist() == [15020427595393229491]
