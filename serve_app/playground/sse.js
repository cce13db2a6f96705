// Server-sent events from pieces of text. Knows the format and not what the events say.

/** A parser: give it text as it comes, and it returns the `data` of each event that has become complete. */
export function createParser() {
  let rest = "";
  let data = [];
  return (text) => {
    const complete = [];
    const lines = (rest + text).split("\n");
    rest = lines.pop();
    for (const line of lines.map((item) => item.replace(/\r$/, ""))) {
      if (line === "") {
        if (data.length) complete.push(data.join("\n"));
        data = [];
      } else if (line.startsWith("data:")) {
        data.push(line.slice(5).replace(/^ /, ""));
      }
    }
    return complete;
  };
}
