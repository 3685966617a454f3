// Files go from the browser's dialog to the model and back without a file on the server.
window.hfRecurrent = {
  /** Ask for a file; returns its content in base64 and its name, both empty if none was chosen. */
  chooseFile() {
    return new Promise((resolve) => {
      const input = document.createElement("input");
      input.type = "file";
      input.accept = ".safetensors";
      input.style.display = "none";
      const end = (found) => {
        input.remove();
        resolve(found);
      };
      input.addEventListener("cancel", () => end(["", ""]));
      input.addEventListener("change", () => {
        const file = input.files[0];
        const reader = new FileReader();
        reader.onload = () => end([reader.result.slice(reader.result.indexOf(",") + 1), file.name]);
        reader.onerror = () => end(["", ""]);
        reader.readAsDataURL(file);
      });
      document.body.append(input);
      input.click();
    });
  },

  /** Offer a state file for download; empties the field that it came in. */
  download(data) {
    if (data) {
      const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([bytes], { type: "application/octet-stream" }));
      link.download = "state.safetensors";
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    }
    return "";
  },
};

// Gradio's client takes Math.random() for the key by which the server knows a visitor. It must not be guessed.
Math.random = () => {
  const [high, low] = crypto.getRandomValues(new Uint32Array(2));
  return ((high >>> 5) * 0x4000000 + (low >>> 6)) / 2 ** 53;
};
