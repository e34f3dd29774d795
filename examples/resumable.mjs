// A chat stream that survives broken connections and dying edges, in any browser (or Node 18+), without a library.
//
//   for await (const chunk of resumableChat(["https://edge-1/v1", "https://edge-2/v1"], { model, messages }))
//     output.textContent += chunk.choices[0]?.delta?.content ?? "";
//
// The same body is posted with the same Idempotency-Key, to one edge after the other, with the position of the last
// chunk as Last-Event-ID: the request runs once, and each chunk arrives once. An edge that is shutting down says so with
// a comment; then the next one is asked at once. An edge that browsers of another origin call needs --allowed-origins.

export async function* resumableChat(baseUrls, body, { apiKey = "", maxAttempts = 20 } = {}) {
  const key = crypto.randomUUID();
  let position = "";
  let fruitless = 0;
  for (let i = 0; ; i++) {
    let isHandedOver = false;
    try {
      const answer = await fetch(`${baseUrls[i % baseUrls.length]}/chat/completions`, {
        method: "POST",
        headers: {
          "Content-Type": "application/json",
          "Idempotency-Key": key,
          "X-Headrace-Resumable": "1",
          ...(apiKey && { Authorization: `Bearer ${apiKey}` }),
          ...(position && { "Last-Event-ID": position }),
        },
        body: JSON.stringify({ ...body, stream: true }),
      });
      if (!answer.ok) {
        const failure = new Error(`HTTP ${answer.status}: ${await answer.text()}`);
        failure.isFinal = answer.status < 500 && ![408, 429].includes(answer.status);
        throw failure;
      }
      let id = position;
      for await (const line of lines(answer.body)) {
        if (line.startsWith("id: ")) id = line.slice(4);
        if (line === ": headrace resume") isHandedOver = true;
        if (!line.startsWith("data: ")) continue;
        if (line === "data: [DONE]") return;
        const chunk = JSON.parse(line.slice(6));
        if (chunk.error) throw Object.assign(new Error(chunk.error.message), { isFinal: true });
        fruitless = 0;
        position = id;
        yield chunk;
      }
      throw new Error("the stream ended without its end");
    } catch (error) {
      if (isHandedOver) continue;
      if (error.isFinal || ++fruitless >= maxAttempts) throw error;
      await new Promise((resolve) => setTimeout(resolve, Math.min(100 * 2 ** fruitless, 2000)));
    }
  }
}

async function* lines(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    yield* parts;
  }
}
