"""The web page in a real browser (headless Chromium); skipped where there is none."""
import base64
import shutil

import pytest
from conftest import png

selenium = pytest.importorskip("selenium")
from selenium import webdriver  # noqa: E402
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not CHROMIUM or not DRIVER, reason="no chromium and chromedriver (Debian: chromium chromium-driver)")


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1100,800"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser, server):
    browser.get(server + "/")
    browser.execute_script("localStorage.clear(); localStorage.setItem('m3.key', 'test-key')")
    browser.refresh()
    wait(browser, lambda: find(browser, "#model").text == "tiny")
    return browser


def find(browser, css):
    return browser.find_element(By.CSS_SELECTOR, css)


def wait(browser, condition, seconds=20):
    passing = (NoSuchElementException, StaleElementReferenceException, IndexError)  # the page draws anew while it streams
    WebDriverWait(browser, seconds, ignored_exceptions=passing).until(lambda _: condition())


def ask(browser, text):
    box = find(browser, "#text")
    box.send_keys(text)
    box.send_keys(Keys.ENTER)


def last(browser, css):
    return browser.find_elements(By.CSS_SELECTOR, "article.assistant" + css)[-1]


def done(browser):
    return "tokens/s" in last(browser, " .note").text


def test_chat_streams_with_thinking_folded_and_counts(page):
    ask(page, "Say hello")
    wait(page, lambda: done(page))
    assert last(page, " > .body").text == "Hello there!"
    details = last(page, " details")
    assert details.get_attribute("open") is None and "Thought for" in details.text
    details.find_element(By.TAG_NAME, "summary").click()
    assert "The user wants a greeting." in details.text
    assert "cached" in last(page, " .note").text


def test_tool_calls_and_markup_are_shown_as_text(page):
    ask(page, "<b>Weather in two</b><img src=x>")
    wait(page, lambda: page.find_elements(By.CSS_SELECTOR, ".call") and done(page))
    assert "weather" in last(page, " .call").text
    assert not page.find_elements(By.CSS_SELECTOR, "article.user b, article.user img"), "nothing that is written becomes markup"


def test_stop_button(page):
    ask(page, "Talk on and on")
    wait(page, lambda: find(page, "#stop").is_displayed())
    find(page, "#stop").click()
    wait(page, lambda: find(page, "#send").is_displayed() and "stopped" in last(page, " .note").text)


def test_a_picture_is_attached_and_sent(page, tmp_path):
    picture = tmp_path / "red.png"
    picture.write_bytes(base64.b64decode(png()))
    find(page, "#files").send_keys(str(picture))
    wait(page, lambda: page.find_elements(By.CSS_SELECTOR, "#attached img"))
    ask(page, "Say hello to")
    wait(page, lambda: done(page))
    assert page.find_elements(By.CSS_SELECTOR, "article.user img")
    assert last(page, " > .body").text == "Hello there!"


def test_settings_are_sent_and_errors_are_shown(page):
    find(page, "#more").click()
    find(page, "#temperature").send_keys("-1")
    page.execute_script("document.activeElement.blur()")
    ask(page, "Say hello")
    wait(page, lambda: page.find_elements(By.CSS_SELECTOR, ".note .error"))
    assert "temperature" in last(page, " .note").text


def test_keyboard_reaches_everything(page):
    seen = set()
    find(page, "#text").click()
    for _ in range(30):
        page.switch_to.active_element.send_keys(Keys.TAB)
        seen.add(page.switch_to.active_element.get_attribute("id"))
    assert {"attach", "thinking", "more", "send", "new", "key"} <= seen


def test_phone_size_has_no_sideways_scrolling(page):
    page.set_window_size(500, 800)
    try:
        assert page.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
        find(page, "#menu").click()
        wait(page, lambda: find(page, "#new").is_displayed())
        find(page, "#new").click()
    finally:
        page.set_window_size(1100, 800)


def test_only_the_own_server_is_asked_and_the_console_is_clean(page, server):
    ask(page, "Say hello")
    wait(page, lambda: done(page))
    import json
    urls = [m["params"]["request"]["url"] for m in (json.loads(e["message"])["message"] for e in page.get_log("performance"))
            if m["method"] == "Network.requestWillBeSent"]
    assert urls and all(u.startswith((server, "data:")) for u in urls), urls
    severe = [e for e in page.get_log("browser") if e["level"] == "SEVERE" and "401" not in e["message"] and "400" not in e["message"]]
    assert not severe, severe
