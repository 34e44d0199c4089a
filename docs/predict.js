// Ask for the reader's prediction, and show the results after it. Without JavaScript, all is shown.
"use strict";

const question = document.getElementById("predict");
const answer = [...document.querySelectorAll("#predict ~ section strong")].find(
  strong => strong.textContent.startsWith("Your prediction"));
if (question && answer) ask();
makeScrollable();
document.querySelectorAll("[role=heading]").forEach(caption => { caption.ariaLevel = 2; });

function ask() {
  const form = makeForm(), results = findResults();
  const show = isShown => results.forEach(element => { element.hidden = !isShown; });
  const commit = prediction => {
    show(true);
    makeScrollable();
    form.replaceWith(sentence(prediction, 'The results are in <a href="#see">See</a>. '));
    answer.closest("p").before(sentence(prediction));
  };
  const showTarget = () => { // of a link, from this page or from a different one
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!results.some(element => element.contains(target))) return;
    show(true);
    makeScrollable();
    target.scrollIntoView();
  };
  question.append(form);
  form.addEventListener("submit", event => {
    event.preventDefault();
    const prediction = new FormData(form).get("prediction");
    try { localStorage.setItem(location.pathname, prediction); } catch { /* not allowed here */ }
    commit(prediction);
    question.querySelector(".prediction").focus(); // a screen reader reads it
  });
  show(false);
  addEventListener("hashchange", showTarget);
  let earlier = null;
  try { earlier = localStorage.getItem(location.pathname); } catch { /* not allowed here */ }
  if (earlier) commit(earlier);
  else showTarget();
}

// Return a form with the options of the question, or with a field for text if it has none.
function makeForm() {
  const form = document.createElement("form");
  form.innerHTML = "<fieldset><legend>Your prediction</legend></fieldset><button>Show the results</button>";
  const lists = [...question.querySelectorAll("ul")];
  const options = lists.find(list => list.textContent.trim().startsWith("(a)"));
  if (!options) form.firstChild.innerHTML +=
    '<textarea name="prediction" rows="3" required aria-label="Your prediction"></textarea>';
  for (const option of options?.children ?? []) {
    const label = document.createElement("label");
    label.innerHTML = '<input type="radio" name="prediction" required> <span></span>';
    label.firstChild.value = option.textContent.trim();
    label.lastChild.append(...(option.querySelector("p") ?? option).childNodes);
    form.firstChild.append(label);
  }
  options?.remove();
  return form;
}

// Find the section "See", those after it, their entries in the contents, and outputs before it.
function findResults() {
  const after = [...document.querySelectorAll("#predict ~ section")];
  const see = after.findIndex(section => section.id === "see"), sections = after.slice(see);
  const entries = [...document.querySelectorAll(".toc-tree li")].filter(
    entry => sections.some(section => entry.querySelector("a").hash === `#${section.id}`));
  const before = after.slice(0, see).map(
    section => [...section.querySelectorAll(".highlight-text, .table-wrapper")]);
  return [...sections, ...entries, ...before.flat()];
}

function sentence(prediction, before = "") {
  const paragraph = document.createElement("p");
  paragraph.className = "prediction";
  paragraph.tabIndex = -1;
  paragraph.innerHTML = `${before}You predicted: <q></q>`;
  paragraph.querySelector("q").textContent = prediction;
  return paragraph;
}

function makeScrollable() { // with the arrow keys
  for (const block of document.querySelectorAll("pre, .table-wrapper")) {
    if (block.scrollWidth > block.clientWidth) block.tabIndex = 0;
  }
}
