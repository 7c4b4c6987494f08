"""Conversations are shown turn by turn."""

import json

import polars as pl

from grpo_tasks.content.conversations import spoken, turn_by_turn

TURNS = [
    {"text": "2+2?", "reward": None, "answers": [{"role": "tool", "content": "4"}]},
    {"text": "Four", "reward": 0.5, "answers": []},
]


def conversation(**others):
    return json.dumps({"turns": TURNS, "ending": "done", "error": None} | others)


def test_each_turn_and_answer_is_a_line_and_a_bad_end_named():
    assert spoken(conversation()) == "[turn 1] 2+2?\n[tool] 4\n[turn 2 (reward 0.5)] Four"
    assert spoken(conversation(ending="turns")).endswith("[out of turns]")
    assert spoken(conversation(ending="error", error="it broke")).endswith("[error: it broke]")


def test_a_table_shows_conversations_in_the_place_of_last_turns():
    table = pl.DataFrame({"completion": ["Four", "One"], "conversation": [conversation(), None]})
    assert turn_by_turn(table)["completion"].to_list() == [spoken(conversation()), "One"]
    assert turn_by_turn(table.drop("conversation"))["completion"].to_list() == ["Four", "One"]
