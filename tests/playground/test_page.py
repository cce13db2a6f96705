"""The page in a real browser, against a real server with the demo model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.playground.conftest import why_not
from tests.playground.driving import SCRUB, add_slider, generate, prose, set_number, wait_for_end
from tests.processes import eventually

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.timeout(600),
]

AXE = Path(__file__).parent / "axe" / "axe.min.js"


def violations(page: Any) -> list[str]:
    """What axe-core finds on the page as it stands."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("() => axe.run()")["violations"]
    return [f"{item['id']}: {node['html']} {node['failureSummary']}" for item in found for node in item["nodes"]]


def test_a_first_visit_needs_one_click_for_a_text(open_page):
    page = open_page()
    assert page.input_value("#prompt") != ""
    generate(page)
    assert len(prose(page)) > len(page.input_value("#prompt")) + 40
    assert "96 tokens" in page.inner_text("[data-testid=facts]")


def test_an_empty_prompt_gives_a_text(open_page):
    page = open_page()
    page.fill("#prompt", "")
    set_number(page, "Tokens", 24)
    generate(page)
    assert len(prose(page)) > 20


def test_the_canvas_fills_out_of_order_and_its_place_can_be_scrubbed(open_page):
    page = open_page()
    set_number(page, "Tokens", 61)
    generate(page)
    whole = prose(page)
    page.locator(".scrub").evaluate(SCRUB, "0")
    assert page.locator(".cell.is-token").count() == 0
    page.get_by_label("Next step", exact=True).click()
    order = []
    while page.locator(".cell.is-landed").count():
        order += page.locator(".cell.is-landed").evaluate_all("(cells) => cells.map((c) => +c.dataset.position)")
        if len(order) == 30:
            break
        page.get_by_label("Next step", exact=True).click()
    assert len(set(order)) == 30
    assert order != sorted(order)
    assert page.locator(".cell.is-token").count() == 30
    assert page.locator(".cell.is-mask").count() == 31
    assert page.locator(".cell.is-prompt").count() == 3
    assert "30 of 61" in page.inner_text("[data-testid=steps]")
    page.get_by_label("Previous step", exact=True).click()
    assert page.locator(".cell.is-token").count() == 29
    page.get_by_label("Play", exact=True).click()
    wait_for_end(page)
    assert prose(page) == whole


def test_a_paused_display_goes_on_recording(open_page):
    page = open_page()
    set_number(page, "Tokens", 40)
    page.click("[data-testid=generate]")
    page.get_by_label("Pause", exact=True).click()
    page.wait_for_selector("[data-testid=generate]:has-text('Generate')")
    assert page.locator(".cell.is-mask").count() > 0
    recorded = int(page.get_attribute(".scrub", "max"))
    assert recorded >= 40
    assert int(page.input_value(".scrub")) < recorded


def test_the_parts_of_an_opened_word_add_up_to_its_logit(open_page):
    page = open_page()
    set_number(page, "Tokens", 30)
    generate(page)
    for i in range(0, 30, 7):
        page.locator(".word").nth(i).click()
        rows = page.locator("[data-testid=token] .sum-row").evaluate_all(
            "(rows) => rows.map((row) => [row.dataset.part, +row.dataset.value])"
        )
        values = dict(rows)
        assert list(values) == ["known", "discovered", "epsilon", "logit"]
        total = values["known"] + values["discovered"] + values["epsilon"]
        assert total == pytest.approx(values["logit"], abs=1e-4)
        assert page.locator("[data-testid=token] .concept-bars li").count() > 0


def test_a_concept_lights_up_the_words_it_drove(open_page):
    page = open_page()
    set_number(page, "Tokens", 30)
    generate(page)
    page.locator("[data-testid=concepts] .concept-name", has_text="animal").first.click()
    lit = page.locator(".word.is-lit").count()
    assert lit > 0
    page.wait_for_selector("[data-testid=lit] .chip")
    assert f"drives {lit} word" in page.inner_text("[data-testid=lit]")
    page.wait_for_selector("[data-testid=lit] h3:has-text('Nearest')")
    assert page.locator("[data-testid=lit] .concept-name").count() == 6
    page.get_by_label("Put the light out").click()
    assert page.locator(".word.is-lit").count() == 0


def test_chunks_show_shares_of_concepts_and_of_epsilon(open_page):
    page = open_page()
    set_number(page, "Tokens", 50)
    generate(page)
    page.click("[data-testid=chunks] summary")
    assert page.locator(".chunk").count() >= 2
    first = page.locator(".chunk").first
    assert "epsilon" in first.inner_text() and "%" in first.inner_text()


def test_a_slider_changes_the_text_of_the_same_seed_and_zero_gives_it_back(open_page):
    page = open_page()
    page.fill("#prompt", "")
    set_number(page, "Tokens", 20)
    generate(page)
    plain = prose(page)
    add_slider(page, "plant", 8)
    generate(page)
    assert prose(page) != plain
    set_number(page, "Strength of plant", 0)
    generate(page)
    assert prose(page) == plain


def test_the_baseline_stands_beside_the_steered_text_with_the_same_seed(open_page):
    page = open_page()
    page.click("[data-testid=example-toward]")
    page.select_option(".speed select", "live")
    wait_for_end(page, lanes=2)
    steered, baseline = page.locator(".prose").all_inner_texts()
    assert steered != baseline
    assert all("seed 1" in facts for facts in page.locator("[data-testid=facts]").all_inner_texts())
    page.click("text=Raw")
    first, second = (
        json.loads(t.partition("\n")[2]) for t in page.locator("[data-testid=raw-request]").all_inner_texts()
    )
    assert "steering" in first and "steering" not in second
    del first["steering"]
    assert first == second


def test_a_faster_policy_shows_what_it_saved(open_page):
    page = open_page()
    set_number(page, "Tokens", 40)
    page.select_option("[data-testid=policy]", "entropy_bound")
    generate(page)
    saved = re.search(r"(\d+) saved", page.inner_text("[data-testid=facts]"))
    assert saved is not None and int(saved[1]) > 0


def test_stop_cancels_on_the_server(open_page, site):
    page = open_page()
    set_number(page, "Tokens", 900)
    num_ended = len(site.client.ends)
    page.click("[data-testid=generate]")
    page.wait_for_selector(".cell.is-token")
    page.click("[data-testid=generate]")
    page.wait_for_selector("[data-testid=stopped]")
    assert eventually(lambda: site.client.ends[num_ended:] == ["left"])


def test_an_error_is_shown_with_code_field_and_request_id(open_page):
    page = open_page(may_fail="400 (Bad Request)")
    set_number(page, "Tokens", 1024)
    with page.expect_response("**/v1/completions") as caught:
        page.click("[data-testid=generate]")
    page.wait_for_selector("[data-testid=error]")
    assert page.inner_text("[data-testid=error-code]") == "context_length_exceeded"
    sent = caught.value.request.headers["x-request-id"]
    assert page.inner_text("[data-testid=request-id]") == caught.value.headers.get("x-request-id", sent)


def test_a_full_queue_says_when_to_come_again(open_page):
    page = open_page(may_fail="429")
    error = {"error": {"message": "full", "type": "rate_limit_error", "param": None, "code": "queue_full"}}
    page.route(
        "**/v1/completions",
        lambda route: route.fulfill(status=429, json=error, headers={"retry-after": "30", "x-request-id": "one"}),
    )
    page.click("[data-testid=generate]")
    page.wait_for_selector("[data-testid=error]")
    assert "The queue is full" in page.inner_text("[data-testid=error]")
    assert "Try again in" in page.inner_text("[data-testid=error] button")
    assert page.inner_text("[data-testid=request-id]") == "one"


def test_a_server_that_is_away_is_said_to_be(open_page):
    page = open_page(may_fail="net::ERR")
    page.route("**/v1/completions", lambda route: route.abort("connectionrefused"))
    page.click("[data-testid=generate]")
    page.wait_for_selector("[data-testid=error]")
    assert "The server is away" in page.inner_text("[data-testid=error]")


def test_a_stream_that_breaks_off_keeps_what_came_and_says_so(open_page):
    page = open_page()
    events = [
        {"seq": 0, "type": "generation.started", "index": 0, "block_length": 8, "prompt_tail": 0},
        {"seq": 1, "type": "block.started", "index": 0, "block": 0, "start": 0, "end": 8},
        step(2, 3, " sea"),
    ]
    page.route("**/v1/completions", lambda route: route.fulfill(content_type="text/event-stream", body=stream(events)))
    page.click("[data-testid=generate]")
    page.wait_for_selector("[data-testid=error]")
    assert page.inner_text("[data-testid=error-code]") == "stream_cut"
    page.wait_for_selector(".cell.is-token")
    assert page.inner_text(".cell.is-token") == "sea"


def step(seq: int, position: int, token: str, name: str = "animal") -> dict[str, Any]:
    concept = {"id": 5, "name": name, "head": "known", "contribution": 1.0}
    commit = {"position": position, "token": token, "bytes": list(token.encode()), "token_id": 1, "confidence": 0.5}
    return {
        "seq": seq,
        "type": "step",
        "index": 0,
        "block": 0,
        "step": seq,
        "commits": [{**commit, "concepts": [concept]}],
    }


def stream(events: list[dict[str, Any]], end: str = "") -> str:
    return "".join(f"data: {json.dumps({'choices': [], 'diffusion': event})}\n\n" for event in events) + end


def test_text_of_the_model_is_never_taken_for_markup(open_page):
    page = open_page()
    evil = "<img src=x onerror=alert(1)>"
    events = [
        {"seq": 0, "type": "generation.started", "index": 0, "block_length": 2, "prompt_tail": 0},
        {"seq": 1, "type": "block.started", "index": 0, "block": 0, "start": 0, "end": 2},
        step(2, 1, evil, name=evil),
        step(3, 0, "<b>\u202ebold</b>"),
        {"seq": 4, "type": "block.sealed", "index": 0, "block": 0, "start": 0, "end": 2, "text": evil},
        {"seq": 5, "type": "generation.done", "steps": 2, "blocks": 1, "forward_passes": 2, "seed": 1, "sampler": "x"},
    ]
    usage = 'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n'
    body = stream(events, usage + "data: [DONE]\n\n")
    page.route("**/v1/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.fill("#prompt", evil)
    generate(page)
    assert evil in prose(page)
    assert page.locator(".prose img, .prose b, .column-why img").count() == 0
    page.locator(".word").nth(1).click()
    assert evil in page.inner_text("[data-testid=token]")
    assert page.locator("main img").count() == 0


def test_a_long_answer_shows_both_its_ends_and_is_copied_whole(open_page):
    """Only the first chunks were shown, and the explanation, the usage and the end mark come last."""
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    events = whole_answer(" sea")
    filler = [{"seq": 5 + i, "type": "block.sealed", "index": 0, "block": 0} for i in range(700)]
    usage = {"choices": [], "usage": {"completion_tokens": 1}}
    body = stream(events + filler, f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n")
    page.route("**/v1/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    generate(page)
    page.click("text=Raw")
    sent = [line.removeprefix("data: ") for line in body.strip().split("\n\n")]
    shown = page.inner_text("[data-testid=raw-answer]").split("\n\n")
    gap = next(i for i, line in enumerate(shown) if not line.startswith("{"))
    assert 0 < gap < len(shown) - 3
    num_hidden = len(sent) - (len(shown) - 1)
    assert num_hidden > 0 and f" {num_hidden} chunks left out" in shown[gap]
    assert [json.loads(line) for line in shown[:gap]] == [json.loads(line) for line in sent[:gap]]
    tail = shown[gap + 1 :]
    assert [json.loads(line) for line in tail[:-1]] == [json.loads(line) for line in sent[-len(tail) : -1]]
    assert json.loads(tail[-2]) == usage and tail[-1] == "[DONE]"
    page.locator(".code-block:has([data-testid=raw-answer])").get_by_role("button", name="Copy").click()
    page.get_by_text("chunk by chunk copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()").split("\n\n")
    assert [json.loads(line) for line in copied[:-1]] == [json.loads(line) for line in sent[:-1]]
    assert copied[-1] == "[DONE]"


def whole_answer(token: str) -> list[dict[str, Any]]:
    """Events of a text of one token."""
    place = {"index": 0, "block": 0, "start": 0, "end": 1}
    return [
        {"seq": 0, "type": "generation.started", "index": 0, "block_length": 2, "prompt_tail": 1},
        {"seq": 1, "type": "block.started", **place},
        step(2, 0, token),
        {"seq": 3, "type": "block.sealed", **place, "text": token},
        {"seq": 4, "type": "generation.done", "steps": 1, "blocks": 1, "forward_passes": 1, "seed": 1, "sampler": "x"},
    ]


def offer(page: Any, **capabilities: Any) -> None:
    """Let the server say that it can do more, and load the page again."""
    page.route("**/v1/capabilities", lambda route: route.fulfill(json=capabilities))
    strings = ["<|start|>", " hello"]
    page.route("**/tokenize", lambda route: route.fulfill(json={"count": 2, "tokens": [1, 2], "token_strs": strings}))
    page.reload()
    page.wait_for_selector(".state-ready")


def test_turns_of_a_chat_carry_what_was_said_before(open_page):
    """The answers are the test's own: the demo model has no chat template."""
    page = open_page()
    assert page.get_by_role("button", name="Chat", exact=True).count() == 0
    asked: list[Any] = []

    def answer(route: Any) -> None:
        asked.append(route.request.post_data_json["messages"])
        text = f" answer{len(asked)}"
        delta = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
        usage = {"choices": [], "usage": {"completion_tokens": 1}}
        end = f"data: {json.dumps(delta)}\n\ndata: {json.dumps(usage)}\n\ndata: [DONE]\n\n"
        route.fulfill(content_type="text/event-stream", body=stream(whole_answer(text), end))

    page.route("**/v1/chat/completions", answer)
    offer(page, has_chat_template=True, has_presets=False)
    page.get_by_role("button", name="Chat", exact=True).click()
    for words in ("first", "second"):
        page.fill("#prompt", words)
        generate(page)
    user, model = ({"role": "user", "content": "first"}, {"role": "assistant", "content": " answer1"})
    assert asked == [[user], [user, model, {"role": "user", "content": "second"}]]
    assert [turn.split("\n")[-1].strip() for turn in page.locator(".turn").all_inner_texts()] == [
        "first",
        "answer1",
        "second",
    ]
    assert "answer2" in prose(page)
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".turn").count() == 0


def test_the_prompt_s_tail_stands_on_the_canvas_by_its_tokens(open_page):
    page = open_page()
    page.fill("#prompt", "an animal that")
    set_number(page, "Tokens", 8)
    generate(page)
    page.locator(".scrub").evaluate(SCRUB, "3")
    page.locator(".cell.is-prompt", has_text="that").wait_for()
    assert page.locator(".cell.is-prompt").all_inner_texts() == ["an", "animal", "that"]


def test_presets_are_saved_and_loaded_as_sliders(open_page):
    page = open_page()
    add_slider(page, "plant", 5)
    page.get_by_label("Name of a new preset").fill("green things")
    page.get_by_role("button", name="Save", exact=True).click()
    page.locator(".presets option", has_text="green-things@1").wait_for(state="attached")
    page.get_by_label("Remove plant").click()
    assert page.locator("[data-testid=slider]").count() == 0
    page.get_by_label("Load a preset").select_option("green-things@1")
    assert page.locator("[data-testid=slider]").count() == 1
    assert page.locator(".slider-number").input_value() == "5"


def test_a_link_restores_settings_and_sends_them_nowhere(open_page, site):
    page = open_page()
    page.fill("#prompt", "a secret \u00e9t\u00e9")
    add_slider(page, "music", 5)
    page.click("text=Share")
    link = page.url
    assert "secret" not in link.partition("#")[0] and "#s=" in link
    other = open_page(link.removeprefix(site.url))
    assert other.input_value("#prompt") == "a secret \u00e9t\u00e9"
    assert other.input_value("[aria-label='Strength of music']") == "5"


def test_the_code_shown_is_the_request_that_is_sent(open_page):
    page = open_page()
    page.fill("#prompt", "it's")
    set_number(page, "Tokens", 8)
    page.click("text=Code")
    curl = page.inner_text("[data-testid=curl]")
    shown = json.loads(curl.partition("--json '")[2].strip().removesuffix("'").replace("'\\''", "'"))
    compile(page.inner_text("[data-testid=python]"), "snippet", "exec")
    page.get_by_label("Close", exact=True).click()
    with page.expect_request("**/v1/completions") as caught:
        generate(page)
    assert caught.value.post_data_json == shown


def test_a_keyboard_writes_asks_and_walks_through_the_words(open_page):
    page = open_page()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    set_number(page, "Tokens", 40)
    page.focus("#prompt")
    page.keyboard.press("Control+A")
    page.keyboard.type("a plant with")
    page.keyboard.press("Control+Enter")
    page.select_option(".speed select", "live")
    wait_for_end(page)
    page.focus(".speed select")
    page.keyboard.press("Tab")
    assert "word" in page.evaluate("document.activeElement.className")
    assert page.locator(".word[tabindex='0']").count() == 1
    first = page.inner_text("[data-testid=token] h2")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("[data-testid=token] h2") != first
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.dataset.position") == "39"
    page.keyboard.press("ArrowUp")
    assert int(page.evaluate("document.activeElement.dataset.position")) < 39
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Escape")
    assert page.locator("[data-testid=token]").count() == 0


def test_the_canvas_has_one_stop_for_the_tab_key_and_arrows_for_the_rest(open_page):
    page = open_page()
    set_number(page, "Tokens", 40)
    generate(page)
    page.get_by_label("Previous step", exact=True).click()
    page.get_by_label("Previous step", exact=True).click()
    page.get_by_label("Previous step", exact=True).click()
    assert page.locator(".cell[tabindex='0']").count() == 1
    page.focus(".cell[tabindex='0']")
    at = int(page.evaluate("document.activeElement.dataset.position"))
    page.keyboard.press("ArrowDown")
    assert int(page.evaluate("document.activeElement.dataset.position")) == at + 8
    page.keyboard.press("ArrowLeft")
    assert int(page.evaluate("document.activeElement.dataset.position")) == at + 7
    assert page.locator(".cell[tabindex='0']").count() == 1


def test_no_width_scrolls_sideways(open_page):
    page = open_page()
    page.click("[data-testid=example-toward]")
    page.select_option(".speed select", "live")
    wait_for_end(page, lanes=2)
    page.locator(".word").first.click()
    page.locator("[data-testid=slider] summary").click()
    page.get_by_role("button", name="Set its weight").click()
    page.get_by_role("button", name="Suppress animal", exact=True).click()
    page.click("summary:has-text('Sampling')")
    for place in ("0", "30", "1000"):
        page.locator(".scrub").evaluate(SCRUB, place)
        for width in (320, 360, 768, 1280, 1440, 2560):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") == width, (place, width)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_to_object_to(open_page, scheme):
    page = open_page(color_scheme=scheme, reduced_motion="reduce", may_fail="400 (Bad Request)")
    assert violations(page) == []
    page.click("[data-testid=example-toward]")
    page.select_option(".speed select", "live")
    wait_for_end(page, lanes=2)
    page.locator(".word").nth(2).click()
    page.locator("[data-testid=concepts] .concept-name").first.click()
    page.click("[data-testid=chunks] summary")
    for more in page.locator(".more summary").all():
        more.click()
    page.get_by_role("button", name="Set its weight").first.click()
    page.locator("[data-testid=override]").wait_for()
    page.get_by_role("button", name="Suppress animal", exact=True).click()
    assert violations(page) == []
    page.locator(".scrub").evaluate(SCRUB, "30")
    page.fill("[role=combobox]", "a")
    page.wait_for_selector("[role=option]")
    assert violations(page) == []
    page.press("[role=combobox]", "Escape")
    page.click("text=Raw")
    assert violations(page) == []
    page.get_by_label("Close", exact=True).click()
    set_number(page, "Tokens", 1024)
    page.click("[data-testid=generate]")
    page.wait_for_selector("[data-testid=error]")
    assert violations(page) == []


def test_the_theme_can_be_chosen_and_is_kept(open_page):
    page = open_page(color_scheme="light")
    page.get_by_label("Dark colours").click()
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.reload()
    page.wait_for_selector(".state-ready")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark
    page.get_by_label("Light colours").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
