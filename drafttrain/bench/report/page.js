// Two conveniences; without scripts the page shows everything in the system's own theme.
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
const buttons = document.querySelectorAll("button[data-draft]");
function show(draft) {
  for (const answer of document.querySelectorAll(".answer")) answer.hidden = answer.dataset.draft !== draft;
  for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.draft === draft));
}
for (const button of buttons) button.addEventListener("click", () => show(button.dataset.draft));
if (buttons.length) show(buttons[0].dataset.draft);
