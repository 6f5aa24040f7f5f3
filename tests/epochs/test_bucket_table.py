from batchtune.epochs.table import BucketTable, batch_sizes_for


def test_a_longer_example_extends_the_table_by_batches_of_one():
    table = BucketTable.of([2, 4], [2, 1])
    assert table.extended_to(4.0) is table
    longer = table.extended_to(9.0)
    assert (longer.boundaries.tolist(), longer.batch_sizes.tolist()) == (
        [2, 4, 9],
        [2, 1, 1],
    )


def test_a_quotient_beyond_all_integers_still_gives_a_batch_size():
    assert batch_sizes_for([1e-300], 1e300).tolist() == [2**53]
