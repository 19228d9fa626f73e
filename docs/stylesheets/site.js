// Short code stays on one line: an option such as --seed would break after its hyphens.
addEventListener("load", () => {
  for (const code of document.querySelectorAll(".md-typeset :not(pre) > code"))
    if (code.textContent.length < 26) code.style.whiteSpace = "nowrap"
})
// A table wider than a phone shows its rows as lists: each cell below the header of its column.
addEventListener("load", () => {
  if (innerWidth > 600) return
  for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
    if (table.getBoundingClientRect().width <= table.closest("article").clientWidth) continue
    const headers = [...table.querySelectorAll("th")].map(th => th.textContent)
    for (const row of table.tBodies[0].rows)
      [...row.cells].forEach((cell, i) => headers[i] && (cell.dataset.header = headers[i]))
    table.classList.add("rows-as-lists")
  }
})
