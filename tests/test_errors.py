from titan_loop.errors import nearest


def test_a_long_list_of_known_names_is_cut_off():
    assert nearest("zzz", ["b", "a"]) == "; known: a, b"
    names = nearest("zzz", map(str, range(10_000))).split(", ")
    assert names[-1] == "…"
    assert len(names) == 61
