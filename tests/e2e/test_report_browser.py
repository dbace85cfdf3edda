"""The run report in a real browser: charts draw, filters filter, episodes open, hostile text stays text."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl.utils.report.build import build
from verl.utils.report.source import open_runs

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (requirements-test.txt)")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH; on Debian: apt-get install chromium")

NASTY = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=2'>&lt;b&gt;"
PATIENCE_MS = 120_000  # the machine may be busy


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses root otherwise
        browser = playwright.chromium.launch(executable_path=BROWSER, args=arguments, timeout=PATIENCE_MS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, tmp_path):
    """``visit(runs, address, **context)``: the report of run folders, opened there. What a test leaves in the console
    fails it."""
    opened, said = [], []

    def begin(folders: list[Path], address: str = "#/", **options):
        file = tmp_path / "report.html"
        file.write_text(build(open_runs(folders)).html, encoding="utf-8")
        context = browser.new_context(**options)
        context.set_default_timeout(PATIENCE_MS)
        context.set_offline(True)
        page = context.new_page()
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("request", lambda request: request.url.startswith(("file:", "data:")) or said.append(request.url))
        page.goto(file.as_uri() + address)
        page.wait_for_selector("body[data-shown]")
        opened.append(context)
        return page

    yield begin
    for context in opened:
        context.close()
    assert said == []


def drawn(page) -> dict[str, int]:
    """Pixels of each chart that are neither paper nor transparent, by metric."""
    return page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll(".chart[data-metric] canvas")].map((canvas) => {
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            let coloured = 0;
            for (let i = 0; i < data.length; i += 4) {
              const [r, g, b, a] = data.slice(i, i + 4);
              if (a > 100 && Math.max(r, g, b) - Math.min(r, g, b) > 60) coloured++;
            }
            return [canvas.closest(".chart").dataset.metric, coloured];
        }))"""
    )


def numbers(page) -> list[int]:
    return [int(row.get_attribute("data-episode")) for row in page.query_selector_all("a.row")]


def test_charts_draw_alerts_are_marked_and_lead_to_their_episodes(visit, write_run):
    page = visit([write_run("one", steps=4), write_run("two", steps=3)])
    coloured = drawn(page)
    assert all(coloured[metric] > 100 for metric in ("critic/score/mean", "reward/f1", "actor/grad_norm")), coloured
    assert "logarithmic" in page.text_content('[data-metric="actor/grad_norm"]')
    assert page.text_content('[data-metric="actor/entropy"] .missing') == "not logged"
    assert page.locator(".alert").count() == 2
    page.locator(".alert a").first.click()
    page.wait_for_selector(".head-card")
    assert page.text_content(".head-card .chip.bad >> nth=-1").endswith("behavior/search_depth")
    assert "Who is mayor number 1?" in page.text_content("h1")


def test_filters_filter_and_search_finds_what_was_said(visit, write_run):
    page = visit([write_run(steps=3)], "#/episodes")
    assert (page.text_content("p[role=status]"), len(numbers(page))) == ("26 of 26 episodes", 26)
    page.fill("[name=from]", "3")
    page.dispatch_event("[name=from]", "change")
    assert numbers(page) == list(range(18, 26))
    page.select_option("[name=source]", "one_hop")
    assert numbers(page) == [22, 23, 24, 25]
    page.fill("[name=min]", "0.5")
    page.dispatch_event("[name=min]", "change")
    assert numbers(page) == [23, 25]
    page.click("text=Clear")
    page.wait_for_selector("p[role=status]:has-text('26 of 26')")
    page.select_option("[name=alert]", "any")
    assert numbers(page) == [12]
    page.select_option("[name=alert]", "")
    page.select_option("[name=sort]", "best")
    assert page.text_content("a.row >> nth=0 >> .chip.num") == "0.75"
    page.fill("[name=text]", "NUMBER 2. the mayor")  # stands in what sample 2 of each group found
    page.wait_for_selector("p[role=status]:text-is('6 of 26 episodes')")
    assert sorted(numbers(page)) == [2, 6, 10, 14, 20, 24]
    page.click("a.row >> nth=0")
    page.wait_for_selector(".turn")
    page.click("text=All episodes")
    page.wait_for_selector("p[role=status]:text-is('6 of 26 episodes')")  # the search is still there


def test_an_episode_reads_as_it_went_and_shows_its_tokens(visit, write_run):
    page = visit([write_run()], "#/episode/1")
    first, last = page.locator(".turn").all()
    assert "Who is the mayor, at step 1?" in first.text_content()
    assert first.locator(".earned").inner_text().split("\n") == [
        *("pbrs", "+0.50", "reward", "+0.50", "advantage", "+1.00", "potential Φ", "0.00 → 0.50")
    ]
    assert "repetition\n−0.25" in last.locator(".earned").inner_text()
    assert last.locator(".answer").text_content() == "Ann"
    assert not first.locator(".hit").is_visible()
    first.locator("summary").click()
    assert first.locator(".hit mark").first.text_content() == "Ann"
    assert page.locator(".group a").count() == 4
    page.click("button:has-text('Tokens')")
    assert "4 sampled tokens, 4 of them carry loss" in page.text_content("article")
    page.locator(".tokens span[data-token]").first.hover()
    assert page.inner_text(".inspect").split("\n")[0].startswith('"Ann"')
    assert "−0.5000 (p 0.607)" in page.text_content(".inspect") and "+0.5000" in page.text_content(".inspect")


def tiles(page) -> list[str]:
    return page.locator(".tile").all_inner_texts()


def test_what_is_compared_is_of_one_kind_and_says_which(visit, write_run):
    page = visit([write_run("one", steps=4), write_run("two", steps=3)])  # one has two validations, two has one
    assert page.inner_text("table >> nth=0").split("\n")[0].split("\t")[2] == "F1, training"
    cells = page.locator("table >> nth=0 >> tr >> nth=1 >> td").all_inner_texts()
    assert cells[2:4] == ["0.2 → 0.8", "0.1 → 0.4"]
    assert page.inner_text('[data-metric="reward/f1"] .key').split() == ["training", "validation"]
    assert page.locator('[data-metric="actor/grad_norm"] .key').count() == 0
    assert "F1, validation\n0.5 → 0.5" in tiles(visit([write_run("three", steps=4)]))


def test_comparing_opens_on_the_first_and_the_last_step(visit, write_run):
    folder = write_run(steps=6)
    rows = json.loads((folder / "rollout" / "val_step_6.json").read_text())
    rows[1] |= {"answer": "Cy", "reward": {"score": 0.0, "f1": 0.0}, "turns": [{"kind": "answer", "answer": "Cy"}]}
    (folder / "rollout" / "val_step_6.json").write_text(json.dumps(rows))
    for step in (1, 5):  # so that only validation asks a question again
        path = folder / "rollout" / f"rollout_step_{step}.json"
        path.write_text(path.read_text().replace("mayor number", f"mayor {step}, number"))
    for step in (2, 3, 4, 6):
        (folder / "rollout" / f"rollout_step_{step}.json").unlink()
    (folder / "rollout" / "val_step_2.json").with_name("rollout_step_0.json").write_text(json.dumps(rows))
    page = visit([folder], "#/compare")
    assert page.text_content("h1") == "Who is mayor number 1?"  # the one whose episodes differ
    chosen = [page.locator(f'[data-side="{side}"] select option:checked').inner_text() for side in ("left", "right")]
    assert chosen == ["validation, step 2 · #1 · score 0.75", "validation, step 6 · #1 · score 0.00"]
    page.click('[data-side="right"] a:has-text("open")')
    page.wait_for_selector("article")
    assert "validation episodes aren't trained on" in page.text_content("article")


def test_two_steps_of_a_question_stand_side_by_side(visit, write_run):
    page = visit([write_run()], "#/episode/18")
    page.click("text=Compare with another step")
    page.wait_for_selector(".pair")
    left, right = (page.locator(f'[data-side="{side}"]') for side in ("left", "right"))
    assert ("at step 1?" in left.text_content(), "at step 3?" in right.text_content()) == (True, True)
    page.select_option('[data-side="left"] select', "8")
    page.wait_for_selector('[data-side="left"]:has-text("at step 2?")')
    assert page.url.endswith("#/compare/8/18")


def test_a_hostile_episode_stays_text(visit, write_run):
    turn = {"kind": "tool_call", "think": NASTY, "queries": [NASTY], "observation": NASTY, "search_ok": True}
    url = "javascript:window.hacked=3"
    found = f'[{{"query": "q", "results": [{{"title": "{NASTY}", "url": "{url}", "text": "{NASTY}"}}]}}]'
    row = {"question": NASTY, "ground_truths": [NASTY, "(", "[a"], "data_source": NASTY, "finish": NASTY}
    end = {"kind": "answer", "answer": NASTY, "text": NASTY}
    row |= {
        "answer": NASTY,
        "error": NASTY,
        "turns": [turn, turn | {"observation": found}, end],
        "reward": {NASTY: 1.0},
    }
    row["turns"][0]["tokens"] = {"ids": "1", "text": NASTY, "widths": str(len(NASTY)), "loss": "1"}
    folder = write_run("<i>run", rows={1: [row], 2: [row]})
    (folder / "behavior_alerts.jsonl").write_text(
        '{"step": 1, "metric": "<img src=x onerror=window.hacked=4>", "message": "<script>window.hacked=5</script>"}\n'
    )
    (folder / "rollout" / "rollout_step_3.json").write_text(f'[3, "{NASTY}"')
    page = visit([folder])
    for address in ("#/episodes", "#/episodes?source=<script>", "#/episode/0", "#/compare/0/1", "#/episode/999", "#/"):
        page.evaluate("(to) => { document.body.removeAttribute('data-shown'); location.hash = to; }", address)
        page.wait_for_selector("body[data-shown]", state="attached")
        for summary in page.locator("#main summary").all():
            summary.evaluate("(element) => { element.parentElement.open = true; }")
        if address == "#/episode/0":
            assert page.text_content("h1") == NASTY
            assert NASTY in page.text_content(".hit")
            page.click("button:has-text('Tokens')")
            assert page.text_content(".tokens [data-token]") == NASTY
        assert page.locator("#main script, #main img, #main i:has-text('run'), a[href^='javascript']").count() == 0
    assert page.evaluate("window.hacked") is None


def test_it_fits_a_phone_and_follows_its_colours(visit, write_run):
    phone = {"width": 360, "height": 700}
    page = visit([write_run()], viewport=phone, is_mobile=True, has_touch=True, color_scheme="dark")
    for address in ("#/", "#/episodes", "#/episode/1", "#/compare"):
        page.evaluate("(to) => { document.body.removeAttribute('data-shown'); location.hash = to; }", address)
        page.wait_for_selector("body[data-shown]") if address != "#/" else None
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), address
    page.evaluate("() => { document.body.removeAttribute('data-shown'); location.hash = '#/'; }")
    page.wait_for_selector("body[data-shown]")
    box = page.locator('[data-metric="reward/f1"] canvas')
    box.scroll_into_view_if_needed()
    area = box.bounding_box()
    page.touchscreen.tap(area["x"] + area["width"] - 30, area["y"] + 60)
    page.tap('a:has-text("its episodes")')  # in the tooltip of the last step
    page.wait_for_selector("p[role=status]:has-text('8 of 26')")
    paper = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(paper) == "rgb(20, 23, 27)"
    page.click("#theme")
    assert page.evaluate(paper) == "rgb(246, 247, 249)"


def test_broken_files_are_told_and_a_damaged_page_says_so(visit, write_run, tmp_path):
    folder = write_run()
    (folder / "rollout" / "rollout_step_2.json").write_text("[{")
    page = visit([folder])
    assert "1 problem with the run's files" in page.text_content(".problems")
    report = tmp_path / "report.html"
    report.write_text(report.read_text().replace('id="block-0">', 'id="block-0">AAAA'))
    page.reload()
    page.wait_for_selector("text=This file is damaged")


@pytest.mark.timeout(600)
def test_200_steps_of_64_episodes_open_quickly(browser, write_run, tmp_path):
    folder = write_run(steps=200, groups=8, samples=8)
    report = build(open_runs([folder]))
    assert len(report.html) < 10_000_000 and report.notes == []
    (tmp_path / "report.html").write_text(report.html, encoding="utf-8")
    page = browser.new_page()
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})  # its own work, however busy the machine is
    page.goto((tmp_path / "report.html").as_uri(), timeout=PATIENCE_MS)
    page.wait_for_selector("body[data-shown]", timeout=PATIENCE_MS)
    used = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    assert page.text_content(".tiles").count("13,600") == 1
    assert used["TaskDuration"] < 3, used
    page.evaluate("location.hash = '#/episodes?text=number%207'")
    page.wait_for_selector("p[role=status]:text-is('3,100 of 13,600 episodes')", timeout=PATIENCE_MS)
    page.close()
