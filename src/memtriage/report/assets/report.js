"use strict";
// The forms that reports are made of: cards, facts, tiles, and text with code in it.
const report = (() => {
  const { element } = page;

  const code = (value) => element("code", {}, value);
  const card = (title, aside, ...content) =>
    element("section", { class: "card" }, element("header", {}, element("h2", {}, title), aside), ...content);

  function facts(pairs) {
    const list = element("dl", { class: "facts" });
    for (const [name, value] of pairs) {
      if (value !== null && value !== undefined && value !== "")
        list.append(element("dt", {}, name), element("dd", {}, value));
    }
    return list;
  }

  // What stands between backticks is code.
  const prose = (words) =>
    words === null
      ? null
      : element("span", {}, ...words.split("`").map((part, index) => (index % 2 ? code(part) : part)));

  const tiles = (items) =>
    element(
      "div",
      { class: "tiles" },
      ...items.map(({ label, value, detail }) =>
        element(
          "div",
          { class: "tile" },
          element("div", { class: "label" }, label),
          element("div", { class: "value number" }, value),
          detail ? element("div", { class: "detail" }, detail) : null,
        ),
      ),
    );

  return { card, code, facts, prose, tiles };
})();
