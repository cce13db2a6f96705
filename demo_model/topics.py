"""The 45 topics: WordNet's lexicographer files, with names and descriptions for readers."""

from __future__ import annotations

from typing import NamedTuple


class Topic(NamedTuple):
    """One lexicographer file."""

    name: str
    group: str
    description: str


TOPICS = (
    Topic("quality", "adjectives", "Adjectives that describe a quality, such as brave or smooth"),
    Topic("pertaining to", "adjectives", "Adjectives made from nouns: of or relating to something"),
    Topic("manner", "adverbs", "Adverbs: in what manner, how often, how far"),
    Topic("broadest notions", "nouns", "Nouns for the broadest notions, such as entity, thing, process"),
    Topic("act", "nouns", "Nouns for acts and actions"),
    Topic("animal", "nouns", "Nouns for animals"),
    Topic("artifact", "nouns", "Nouns for things that people make"),
    Topic("attribute", "nouns", "Nouns for attributes of people and things"),
    Topic("body", "nouns", "Nouns for parts of the body"),
    Topic("cognition", "nouns", "Nouns for thoughts, beliefs and fields of study"),
    Topic("communication", "nouns", "Nouns for messages, writings, languages and signs"),
    Topic("event", "nouns", "Nouns for natural events and happenings"),
    Topic("feeling", "nouns", "Nouns for feelings and emotions"),
    Topic("food", "nouns", "Nouns for food and drink"),
    Topic("group", "nouns", "Nouns for groups of people, animals or things"),
    Topic("location", "nouns", "Nouns for places and regions"),
    Topic("motive", "nouns", "Nouns for motives and goals"),
    Topic("natural object", "nouns", "Nouns for natural objects, not made by people"),
    Topic("person", "nouns", "Nouns for people"),
    Topic("phenomenon", "nouns", "Nouns for natural phenomena"),
    Topic("plant", "nouns", "Nouns for plants"),
    Topic("possession", "nouns", "Nouns for possessions, money and their transfer"),
    Topic("process", "nouns", "Nouns for natural processes"),
    Topic("quantity", "nouns", "Nouns for quantities and units of measure"),
    Topic("relation", "nouns", "Nouns for relations between people, things or ideas"),
    Topic("shape", "nouns", "Nouns for two- and three-dimensional shapes"),
    Topic("state", "nouns", "Nouns for conditions and states of affairs"),
    Topic("substance", "nouns", "Nouns for substances"),
    Topic("time", "nouns", "Nouns for times and periods"),
    Topic("body care", "verbs", "Verbs of grooming, dressing and bodily functions"),
    Topic("change", "verbs", "Verbs of changing size, temperature, intensity and the like"),
    Topic("thinking", "verbs", "Verbs of thinking, judging, analysing, doubting"),
    Topic("telling", "verbs", "Verbs of telling, asking, ordering, singing"),
    Topic("competition", "verbs", "Verbs of fighting and athletic contests"),
    Topic("consumption", "verbs", "Verbs of eating, drinking and using up"),
    Topic("contact", "verbs", "Verbs of touching, hitting, tying, digging"),
    Topic("creation", "verbs", "Verbs of sewing, baking, painting, performing"),
    Topic("emotion", "verbs", "Verbs of feeling"),
    Topic("motion", "verbs", "Verbs of walking, flying, swimming"),
    Topic("perception", "verbs", "Verbs of seeing, hearing, feeling"),
    Topic("transfer", "verbs", "Verbs of buying, selling, owning, giving"),
    Topic("social life", "verbs", "Verbs of political and social activities and events"),
    Topic("being", "verbs", "Verbs of being, having, spatial relations"),
    Topic("weather", "verbs", "Verbs of raining, snowing, thawing, thundering"),
    Topic("participles", "adjectives", "Adjectives that are participles of verbs"),
)
