// Filters the rows of all tables by words, and sorts a table by a column. Without it the page is whole, only still.
"use strict";
(() => {
  const all = [...document.querySelectorAll("tbody tr")].map((row, place) => {
    const heading = row.closest("section").querySelector("h2");
    return { row, place, text: `${heading.textContent} ${row.textContent}`.toLowerCase() };
  });
  const tools = document.querySelector(".tools"), input = tools.querySelector("input"), told = tools.querySelector("span");

  function filter() {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const { row, text } of all) {
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    for (const figure of document.querySelectorAll("figure")) {
      if (figure.querySelector("table")) figure.hidden = !figure.querySelector("tbody tr:not([hidden])");
    }
    for (const section of document.querySelectorAll("section")) {
      section.hidden = words.length > 0 && !section.querySelector("tbody tr:not([hidden])");
    }
    told.textContent = words.length ? `${shown} of ${all.length} rows` : "";
  }

  const order = new Intl.Collator(undefined, { numeric: true });
  const place = new Map(all.map(({ row, place }) => [row, place]));

  function sort(head) {
    const table = head.closest("table"), body = table.tBodies[0], column = head.cellIndex;
    const next = { none: "ascending", ascending: "descending", descending: "none" }[head.ariaSort ?? "none"];
    for (const other of table.tHead.rows[0].cells) other.ariaSort = "none";
    head.ariaSort = next;
    const value = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent;
    const way = next === "descending" ? -1 : 1;
    const rows = [...body.rows].sort((a, b) => {
      if (next === "none") return place.get(a) - place.get(b);
      const [x, y] = [value(a), value(b)];
      if (x === "-" || y === "-") return (x === "-") - (y === "-"); // what there is not comes last, either way
      return way * (isNaN(x) || isNaN(y) ? order.compare(x, y) : x - y);
    });
    body.append(...rows);
  }

  for (const head of document.querySelectorAll("th")) head.querySelector("button").addEventListener("click", () => sort(head));
  for (const cell of document.querySelectorAll("td.long")) cell.addEventListener("click", () => cell.classList.toggle("open"));
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((details) => (details.open = true)));
  input.addEventListener("input", filter);
  tools.hidden = false;
})();
