"""The text and elements of an HTML page, for tests."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Text, numbers on top and what a page refers to."""

    def __init__(self, html):
        super().__init__()
        self.references, self.words = [], []
        self.feed(html)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.references += [value for name, value in attributes if name in ("src", "href", "srcset", "data")]
        assert tag not in ("script", "link", "iframe")

    def handle_data(self, data):
        self.words.append(data)
