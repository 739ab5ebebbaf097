package routing

import (
	"bytes"
	"maps"
	"slices"

	"github.com/outrelay/outrelay/internal/base/glob"
	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
)

// Rule maps matching envelopes to one or several topics. An empty pattern matches all; * and ? are wildcards.
type Rule struct {
	AggregateType        string // pattern
	Type                 string // pattern
	Database, Collection string // patterns
	// Headers and Fields have patterns by the name of a header or of a field of the document. An envelope without the
	// header or the field does not match.
	Headers, Fields map[string]string

	To   []string // topics, as templates
	Drop bool     // discard the envelope; To is empty
}

type rule struct {
	aggregateType, typ string
	conditions         []condition
	to                 []template
	drop               bool
}

// condition is a pattern for a value of the envelope.
type condition struct {
	placeholder
	pattern string
}

// parseConditions returns the conditions of a rule other than those on its types.
func (r *Router) parseConditions(bad *InvalidError, field string, rule Rule) (list []condition) {
	add := func(key, kind, name, pattern string) {
		if pattern == "" {
			bad.addProblem(key, "", "expected a pattern; * matches any value")
			return
		}
		text := kind
		if name != "" || kind == kindHeader || kind == kindField {
			text += ":" + name
		}
		placeholder, err := parsePlaceholder(text, r.mapping, topicPlaceholders)
		if err != nil {
			bad.addProblem(key, name, err.Error())
			return
		}
		r.addInput(placeholder)
		list = append(list, condition{placeholder, pattern})
	}

	if rule.Database != "" {
		add(field+".database", kindDatabase, "", rule.Database)
	}
	if rule.Collection != "" {
		add(field+".collection", kindCollection, "", rule.Collection)
	}
	for _, name := range slices.Sorted(maps.Keys(rule.Headers)) {
		add(field+".headers."+name, kindHeader, name, rule.Headers[name])
	}
	for _, name := range slices.Sorted(maps.Keys(rule.Fields)) {
		add(field+".fields."+name, kindField, name, rule.Fields[name])
	}

	for name, pattern := range map[string]string{"aggregatetype": rule.AggregateType, "type": rule.Type} {
		if pattern != "" && !r.mapping.Has(name) {
			bad.addProblem(field+"."+name, pattern, "by the mapping, the documents have no "+name)
		}
	}
	return list
}

// addInput notes that decisions depend on a value.
func (r *Router) addInput(placeholder placeholder) {
	switch {
	// The aggregatetype is part of every key.
	case placeholder.kind == "aggregatetype":
	case placeholder.kind == "type":
		r.byType = true
	case !slices.Contains(r.inputs, placeholder):
		r.inputs = append(r.inputs, placeholder)
	}
}

// NeedsDocument reports whether the topics of an envelope depend on its headers, or on fields of its document that are no
// part of the envelope.
func (r *Router) NeedsDocument() bool {
	return slices.ContainsFunc(r.inputs, func(placeholder placeholder) bool {
		return placeholder.kind == kindHeader || placeholder.kind == kindField
	})
}

// appendInputs appends the other values on which the decision depends to a cache key. ok is false if one of them
// has no text, or if the key would be ambiguous or too long.
func (r *Router) appendInputs(key []byte, view *envelope.View, meta *Meta) (_ []byte, ok bool) {
	if r.byType && bytes.IndexByte(view.Type, 0) >= 0 {
		return key, false
	}

	for i := range r.inputs {
		var finding envelope.Finding
		// A NUL ends the value before, and the next byte is for the finding.
		start := len(key) + 2
		key, finding = r.inputs[i].appendTo(append(key, 0, 0), view, meta)
		// A missing value and an empty one lead to different decisions.
		key[start-1] = byte(finding)
		ambiguous := bytes.IndexByte(key[start:], 0) >= 0
		if finding > envelope.Missing || len(key) > maxCachedKey || ambiguous {
			return key, false
		}
	}
	return key, true
}

// topicNames returns the topics that Choose returns, else the topics of the first matching rule, else the topic of the
// template. The rejection has class Dropped if the rule discards the envelope.
func (r *Router) topicNames(view *envelope.View, meta *Meta) ([]string, *record.Rejection) {
	if chosen := r.chooseTopics(view); len(chosen) > 0 {
		return removeRepetitions(chosen), nil
	}
	to := []template{r.fallback}
	if rule := r.findRule(view, meta); rule != nil {
		if rule.drop {
			return nil, discarded
		}
		to = rule.to
	}

	names := make([]string, len(to))
	for i, t := range to {
		// With a missing value, the template would name another topic, such as "events." for events.{type}.
		name, worst := t.appendTo(nil, view, meta)
		if reason := t.findProblem(view, meta, envelope.Missing); reason != "" {
			return nil, &record.Rejection{Class: worst.Class(), Reason: "its topic is unknown: " + reason}
		}
		names[i] = string(name)
	}
	return removeRepetitions(names), nil
}

// discarded is the rejection of an envelope to which a rule with drop applies.
var discarded = &record.Rejection{Class: record.Dropped, Reason: "a rule of topics.rules discards it"}

// discards reports whether a rule discards an envelope that names its topic. It counts no topic of the rules.
func (r *Router) discards(view *envelope.View, meta *Meta) bool {
	return r.decideCached(&r.discardCache, (*Router).decideDiscard, view, meta).rejection != nil
}

// decideDiscard is discards without the cache.
func (r *Router) decideDiscard(view *envelope.View, meta *Meta) (decided decision) {
	if len(r.chooseTopics(view)) > 0 {
		return decided
	}
	if rule := r.findRule(view, meta); rule != nil && rule.drop {
		decided.rejection = discarded
	}
	return decided
}

// chooseTopics returns the topics that the function of the service chooses, if there are any.
func (r *Router) chooseTopics(view *envelope.View) []string {
	if r.choose == nil {
		return nil
	}
	return r.choose(string(view.AggregateType), string(view.Type))
}

// findRule returns the first rule that applies to an envelope, or nil.
func (r *Router) findRule(view *envelope.View, meta *Meta) *rule {
	aggregateType, typ := string(view.AggregateType), string(view.Type)
	for i := range r.rules {
		if r.rules[i].matches(aggregateType, typ, view, meta) {
			return &r.rules[i]
		}
	}
	return nil
}

// matches reports whether the rule applies to an envelope.
func (r *rule) matches(aggregateType, typ string, view *envelope.View, meta *Meta) bool {
	if !glob.Match(r.aggregateType, aggregateType) || !glob.Match(r.typ, typ) {
		return false
	}
	for _, c := range r.conditions {
		text, finding := c.appendTo(nil, view, meta)
		if finding != envelope.Found || !glob.Match(c.pattern, text) {
			return false
		}
	}
	return true
}
