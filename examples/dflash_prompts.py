"""Chat prompts for ``train_dflash.py``: kinds of request times topics, and some that fit neither.

Topics for evaluation are never in a prompt for training, and neither is a hand-written prompt.
"""

from __future__ import annotations

import random

import fp4jax

REQUESTS = """
What is {a}?
Explain {a} in simple words.
Explain {a} to a ten-year-old.
Why is {a} important?
Give me five facts about {a}.
List three advantages and three disadvantages of {a}.
Write a short story about {a}.
Write a poem about {a}.
Write a short paragraph about {a}.
Write an introduction to an essay on {a}.
What should a beginner know about {a}?
How has {a} changed over the last hundred years?
What are common misunderstandings about {a}?
Suggest three questions to ask an expert on {a}.
Describe {a} in two sentences.
Write a dialogue between a teacher and a student about {a}.
What are some good books or ways to learn about {a}?
Summarize the history of {a}.
Write a blog post title and opening about {a}.
Give me step-by-step advice on {a}.
What problems can come up with {a}, and how are they solved?
Write a short speech about {a}.
Write a quiz question about {a}, with four answers.
Imagine the future of {a}. What is it like?
Write a letter to a friend about {a}.
How does {a} affect our daily life?
""".strip().splitlines()

PAIRS = """
Compare {a} and {b}.
What do {a} and {b} have in common?
Write a short story in which {a} and {b} play a part.
How could {a} be connected with {b}?
Which matters more to people, {a} or {b}? Give reasons.
I am interested in {a} and {b}. What should I read first?
Explain {a} with an example that has to do with {b}.
Write a riddle whose answer is {a}, then one whose answer is {b}.
""".strip().splitlines()

TOPICS = """
photosynthesis; gravity; volcanoes; the water cycle; electricity; magnets; black holes; the Moon;
Mars; comets; the Sun; rainbows; thunderstorms; earthquakes; oceans; rivers; deserts; rainforests;
glaciers; climate change; recycling; solar power; wind turbines; nuclear energy; batteries;
dinosaurs; whales; elephants; penguins; owls; bees; butterflies; ants; spiders; sharks; octopuses;
wolves; horses; dogs; cats; trees; mushrooms; flowers; gardens; farms; bread; cheese; chocolate;
coffee; tea; soup; salad; pizza; rice; apples; healthy eating; vitamins; sleep; exercise; running;
swimming; cycling; yoga; football; basketball; chess; the Olympic Games; teamwork; friendship;
family; kindness; honesty; courage; patience; happiness; stress; good habits; time management;
public speaking; job interviews; saving money; taxes; banks; inflation; supply and demand; trade;
advertising; small businesses; startups; remote work; leadership; email; passwords; computers;
programming; Python functions; sorting a list; databases; the internet; search engines; robots;
artificial intelligence; machine learning; smartphones; cameras; video games; social media;
airplanes; trains; ships; bicycles; electric cars; bridges; skyscrapers; houses; cities; villages;
maps; languages; grammar; handwriting; poetry; novels; libraries; museums; painting; sculpture;
photography; theatre; dance; the piano; the guitar; drums; jazz; opera; films; cartoons; jokes;
fairy tales; dragons; ghosts; pirates; knights; castles; ancient Egypt; ancient Rome; ancient
Greece; the Middle Ages; the Renaissance; the Industrial Revolution; the printing press; the
telephone; democracy; elections; laws; courts; human rights; schools; homework; teachers; exams;
universities; mathematics; fractions; triangles; prime numbers; probability; statistics; algebra;
the scientific method; experiments; atoms; molecules; acids; metals; plastics; glass; paper; the
heart; the brain; the lungs; bones; muscles; blood; teeth; skin; viruses; bacteria; vaccines;
doctors; nurses; first aid; allergies; headaches; camping; hiking; fishing; travel; hotels; Japan;
Brazil; Canada; India; Egypt; France; Australia; Kenya; Paris; London; New York; islands; mountains;
caves; lighthouses; winter; spring; summer; autumn; snow; fog; the wind; fire; clocks; calendars;
birthdays; weddings; holidays; gifts; toys; kites; balloons; umbrellas; shoes; hats; jewelry; soap;
furniture; kitchens; cleaning; laundry; neighbors; volunteers; farmers; bakers; sailors; pilots;
astronauts; inventors; explorers; detectives; kings; dreams; memory; colors; shadows; echoes;
silence; music lessons; learning to cook; raising a puppy; growing tomatoes; writing a diary
"""

EVALUATION_TOPICS = """
the Great Wall of China; tides; honey; penicillin; compound interest; camels; origami; the violin;
hurricanes; bamboo; the Amazon River; kangaroos; paragraph writing; keeping fish; fossils; tennis
"""

OWN_WORDS = """
What is the capital of France, and what is it known for?
My plants keep dying even though I water them every day. What am I doing wrong?
Write a thank-you note to my grandmother for the sweater she knitted me.
How do I boil an egg so that the yolk stays soft?
I have a meeting with my boss tomorrow and I am nervous. Any advice?
Translate "good morning" into Spanish, French and German.
Write a Python function that returns the largest number in a list.
What happens when you mix baking soda and vinegar?
Give me ideas for a rainy afternoon with two small children.
Tell me about a time when people believed that the Earth was flat.
My friend has not answered my messages for a week. What could I say to her?
What is 17 plus 25? Show how you work it out.
Plan a three-day trip to Rome for someone who loves food.
Write the first paragraph of a mystery novel set on a train.
Why do leaves fall, and what happens to them on the ground?
Rewrite this more politely: Send me the report now.
""".strip().splitlines()


def training_prompts(count: int, seed: int = 0) -> list[str]:
    """Different prompts, half with one topic and half with two; over again if they run out."""
    topics = _topics(TOPICS)
    rng = random.Random(seed)
    single = [request.format(a=a) for request in REQUESTS for a in topics]
    rng.shuffle(single)
    prompts = single[: count // 2]
    pairs = len(topics) * (len(topics) - 1)
    most = min(count - len(prompts), len(PAIRS) * pairs)
    for number in rng.sample(range(len(PAIRS) * pairs), most):
        request, rest = divmod(number, pairs)
        a, b = divmod(rest, len(topics) - 1)
        prompts.append(PAIRS[request].format(a=topics[a], b=topics[b + (b >= a)]))
    rng.shuffle(prompts)
    return [prompts[i % len(prompts)] for i in range(count)]


def evaluation_prompts() -> list[str]:
    """Topics that training has not seen, then requests of no known kind."""
    return [
        REQUESTS[i % len(REQUESTS)].format(a=topic)
        for i, topic in enumerate(_topics(EVALUATION_TOPICS))
    ] + OWN_WORDS


def encode(tokenizer: fp4jax.Tokenizer, prompt: str) -> list[int]:
    """Token ids of one prompt: a chat of one turn where the model has a template."""
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat([{"role": "user", "content": prompt}])
    return tokenizer.encode(prompt)


def _topics(text: str) -> list[str]:
    return " ".join(text.split()).split("; ")
