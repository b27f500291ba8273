"""`python -m bench.papers`: one line for what is wrong, tables, calls in other processes."""

import math

import pytest

from bench.papers import report
from bench.papers.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lancet", "--figures", "17"], "figures of lancet: got 17, expected some of 11,12,13,15,16"),
        (["lancet", "--figures", ""], "got , expected some of"),
        (["hidup", "--figures", "13"], "figures of hidup: got 13, expected some of 6,7,8"),
        (["primepar", "--figures", "11"], "expected none: all is simulated together"),
        (["lancet", "--output-folder", "/dev/null/x"], "file to write: got /dev/null/x"),
    ],
)
def test_wrong_input_is_one_line(capsys, arguments, message):
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def test_a_column_for_each_key_with_numbers_to_the_right():
    rows = [{"name": "a", "ms": {"none": 1.25}}, {"name": "longer", "ms": {"none": 10.0, "lancet": 1234.5}}]
    exhibit = report.Exhibit("1", "Times", rows, notes=["measured"])
    assert exhibit.lines() == [
        "",
        "Times",
        "  name    ms none  ms lancet",
        "  a          1.25",
        "  longer       10       1234",
        "  measured",
    ]
    assert report.table([]) == ["  "]


@pytest.mark.parametrize(
    ("rules", "holds"),
    [
        ([["speedup.most", ">=", 2]], True),
        ([["speedup.most", "<", 2.5], ["speedup.least", "near", 1.0, 0.1]], False),
        ([["speedup.least", "near", 1.0, 0.25]], True),
        ([["speedup.least", "<", "speedup.most"]], True),
        ([["names[one]", "is", "a"]], True),
        ([["names[one]", "is", "speedup"]], False),
    ],
)
def test_a_claim_is_compared_and_says_why_only_where_it_does_not_hold(rules, holds):
    told = {"name": "faster", "published": "2x", "ours": "{speedup.most:.1f}x", "holds": rules}
    quantities = {"speedup": report.Span.of([2.25, 1.25]), "names": {"one": "a"}}
    expected = {"name": "faster", "paper": "2x", "ours": "2.2x", "holds": holds}
    why = {} if holds else {"why": "on a, say"}
    assert report.compared(told | {"why": "on {names[one]}, say"}, quantities) == expected | why
    assert report.compared(told, quantities) == expected


@pytest.mark.long
def test_calls_in_other_processes_keep_their_order():
    assert report.in_processes([(math.sqrt, (n * n,)) for n in range(5)]) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"math domain|nonnegative"):
        report.in_processes([(math.sqrt, (1,)), (math.sqrt, (-1,))])
