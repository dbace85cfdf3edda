"""Each service gets its own form, once as an alert begins; what goes wrong is said without the address."""

import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from verl.utils.notify import QUIET_STEPS, WEBHOOKS, WebhookNotifier


@pytest.fixture
def service():
    """(address, bodies by path, replies by path)"""
    got: dict[str, list[dict]] = {}
    replies: dict[str, tuple[int, str]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.setdefault(self.path, []).append(json.loads(body))
            status, text = replies.get(self.path, (200, "ok"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", got, replies
    server.shutdown()
    server.server_close()


def test_every_service_gets_its_form(service):
    url, got, _ = service
    notifier = WebhookNotifier("exp", {name: f"{url}/{name}" for name in WEBHOOKS} | {"NOTIFY_OTHER_URL": url})
    notifier.alert(3, {"depth": "step 3: depth is 0", "kl": "step 3: kl is 9"})
    notifier.close()
    text = "MiniResearcher, exp: step 3: depth is 0; step 3: kl is 9"
    assert got == {
        "/NOTIFY_SLACK_URL": [{"text": text}],
        "/NOTIFY_DISCORD_URL": [{"content": text}],
        "/NOTIFY_LARK_URL": [{"msg_type": "text", "content": {"text": text}}],
        "/NOTIFY_DINGTALK_URL": [{"msgtype": "text", "text": {"content": text}}],
        "/NOTIFY_WECOM_URL": [{"msgtype": "text", "text": {"content": text}}],
    }


def test_an_alert_that_lasts_is_sent_once(service):
    url, got, _ = service
    notifier = WebhookNotifier("exp", {"NOTIFY_SLACK_URL": f"{url}/slack"})
    again = 40 + QUIET_STEPS + 1
    for step in (*range(1, 41), again):
        notifier.alert(step, {"depth": f"depth at {step}"} | ({"kl": f"kl at {step}"} if step == 2 else {}))
        notifier.close()  # so that they come in order
    texts = [body["text"].partition(": ")[2] for body in got["/slack"]]
    assert texts == ["depth at 1", "kl at 2", f"depth at {again}"]


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ((404, "no"), "status 404"),
        ((200, '{"errcode": 93000}'), "code 93000"),
        ((200, '{"code": 19021}'), "code 19021"),
    ],
)
def test_a_refusal_is_said_without_the_address(service, caplog, reply, why):
    url, _, replies = service
    replies["/SECRET"] = reply
    with caplog.at_level(logging.INFO):
        notifier = WebhookNotifier("exp", {"NOTIFY_LARK_URL": f"{url}/SECRET"})
        notifier.alert(1, {"depth": "low"})
        notifier.close()
    assert [record.message for record in caplog.records if record.name.startswith("verl")] == [
        f"NOTIFY_LARK_URL: an alert was not delivered ({why})"
    ]
    assert "SECRET" not in caplog.text


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/SECRET", "no address/SECRET", "http://[SECRET"])
def test_an_address_that_does_not_work_ends_nothing(caplog, url):
    notifier = WebhookNotifier("exp", {"NOTIFY_SLACK_URL": url})
    notifier.alert(1, {"depth": "low"})
    notifier.close()
    assert "NOTIFY_SLACK_URL: an alert was not delivered" in caplog.text and "SECRET" not in caplog.text


def test_without_an_address_nothing_is_sent():
    notifier = WebhookNotifier("exp", {"NOTIFY_SLACK_URL": " "})
    notifier.alert(1, {"depth": "low"})
    assert notifier.targets == {} and notifier._sending == []
