"""A run that turns to other data reads it from the beginning once, however often it is started again."""

from everstep.run.data_start import began_after


def test_the_first_start_says_where_data_begins_and_later_ones_keep_to_it(tmp_path):
    assert began_after(tmp_path, "a", 100) == 100
    assert began_after(tmp_path, "a", 130) == 100, "a later start goes on with the rows that come then"
    assert began_after(tmp_path, "b", 130) == 130, "other data begins where the run turns to it"
    assert began_after(tmp_path, "a", 90) == 90, "a run that went back before its beginning begins again"
