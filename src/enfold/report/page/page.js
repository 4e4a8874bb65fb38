"use strict";
(() => {
  const root = document.documentElement;

  // The theme: as the system, light, dark. A browser that keeps nothing for files is asked again each time.
  const themes = ["auto", "light", "dark"];
  const words = { auto: "as the system", light: "light", dark: "dark" };
  const keep = (name, value) => { try { localStorage.setItem(name, value); } catch { /* not kept */ } };
  const kept = (name) => { try { return localStorage.getItem(name); } catch { return null; } };
  const button = document.getElementById("theme");
  const choose = (theme) => {
    root.dataset.theme = theme;
    if (!button) return;
    button.querySelector("span").textContent = theme;
    button.setAttribute("aria-label", `Colour theme: ${words[theme]}`);
  };
  choose(themes.includes(kept("enfold-theme")) ? kept("enfold-theme") : "auto");
  button?.addEventListener("click", () => {
    const next = themes[(themes.indexOf(root.dataset.theme) + 1) % themes.length];
    choose(next);
    keep("enfold-theme", next);
  });

  // Tables: a click on a column's name sorts by it, a second one the other way round; what has no value stays last.
  const order = (column, down) => (one, other) => {
    const [a, b] = [one.cells[column], other.cells[column]];
    const [x, y] = [a, b].map((cell) => (cell.dataset.value === undefined ? NaN : Number(cell.dataset.value)));
    if (!Number.isNaN(x) && !Number.isNaN(y)) return down ? y - x : x - y;
    if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
    return (down ? -1 : 1) * a.textContent.localeCompare(b.textContent, "en", { numeric: true });
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((each) => each.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order(column, down)));
    }));
  }

  // On a phone a tap shows a figure at its own size.
  for (const frame of document.querySelectorAll("figure .scroll")) {
    frame.addEventListener("click", () => frame.classList.toggle("zoomed"));
  }

  // Paper has no buttons: what is folded away is opened before printing.
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => { each.open = true; }));

  document.getElementById("save")?.addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([document.getElementById("results").textContent], { type: "application/json" }));
    link.download = "results.json";
    link.click();
    URL.revokeObjectURL(link.href);
  });

  // A page that is served while its run grows asks whether there is more, and comes back to where one was reading.
  if (document.body.hasAttribute("data-live")) {
    const look = async () => {
      try {
        const stamp = await (await fetch("stamp", { cache: "no-store" })).text();
        if (stamp !== document.body.dataset.live) return location.reload(); // once: a page may take longer than a look
      } catch { /* the server has stopped: the page stays as it is */ }
      setTimeout(look, 2000);
    };
    setTimeout(look, 2000);
  }
})();
