package routing

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/outrelay/outrelay/internal/glob"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/pkg/event"
)

// Config is what a Router goes by.
type Config struct {
	Template string   // topic of what no rule matches; {aggregatetype} and {type} are filled in. Empty: DefaultTemplate
	Rules    []Rule   // the first that matches decides
	Allow    []string // patterns of topics that may be written; empty allows all but Kafka's internal ones
	Max      int      // how many topics envelopes may name, beside those that the rules name in full; 0: DefaultMax
}

// DefaultMax is the default of Config.Max. Each topic costs the relay about 5 kB, and a line in the watcher document.
const DefaultMax = 5000

// DefaultTemplate is the topic that Debezium's outbox routers use.
const DefaultTemplate = "outbox.event.{aggregatetype}"

// Rule sends what it matches to one or several topics.
type Rule struct {
	AggregateType string   // pattern with * and ?; empty matches all
	Type          string   // likewise
	To            []string // topics, as templates
}

// Target is one topic an envelope goes to, and the partition it asks for or [record.AnyPartition].
type Target struct {
	Topic     string
	Partition int32
}

// Problem is one thing that is wrong with a configuration.
type Problem struct {
	Field  string // template, rules[1].to[0], allow[2], headers.name…
	Found  string
	Reason string // what is allowed
}

// InvalidError is everything that is wrong with a configuration.
type InvalidError struct{ Problems []Problem }

func (e *InvalidError) Error() string {
	lines := make([]string, len(e.Problems))
	for i, p := range e.Problems {
		lines[i] = fmt.Sprintf("%s: found %q; %s", p.Field, p.Found, p.Reason)
	}
	return "routing: " + strings.Join(lines, "; ")
}

func (e *InvalidError) addProblem(field, found, reason string) {
	e.Problems = append(e.Problems, Problem{field, found, reason})
}

func (e *InvalidError) errOrNil() error {
	if len(e.Problems) == 0 {
		return nil
	}
	return e
}

// MaxCached is how many decisions a Router remembers. Envelopes choose the keys, so beyond it the memory starts over.
const MaxCached = 10_000

// maxCachedKey is the longest pair of names whose decision is remembered.
const maxCachedKey = 512

// Router chooses topics. Create it with [New].
type Router struct {
	fallback template
	rules    []rule
	allow    []string
	byType   bool // decisions depend on the type, not on the aggregatetype alone

	maxTopics    int
	staticTopics map[string]bool // topics that the configuration names in full; they do not count

	mu            sync.RWMutex
	exists        func(topic string) bool
	countedTopics map[string]struct{} // topics that were allowed since the last Begin; at most `most`
	byTypeCache   map[string]decision // aggregatetype, or aggregatetype NUL type
	byTopicCache  map[string]decision // topics that envelopes name themselves
}

type rule struct {
	aggregateType, typ string
	to                 []template
}

// decision is what Route answers for a key; targets have AnyPartition.
type decision struct {
	targets   []Target
	refusal   *record.Refusal
	transient bool // it may be another one soon, so it is not remembered
}

// New checks the configuration; its error is an [*InvalidError] with everything that is wrong.
func New(c Config) (*Router, error) {
	r := &Router{allow: c.Allow, maxTopics: cmp.Or(c.Max, DefaultMax), staticTopics: make(map[string]bool)}
	r.Begin(func(string) bool { return false })
	bad := &InvalidError{}
	for i, pattern := range c.Allow {
		if why := checkTopicCharacters(strings.NewReplacer("*", "", "?", "").Replace(pattern)); pattern == "" || why != "" {
			bad.addProblem(fmt.Sprintf("allow[%d]", i), pattern, "expected a topic name, in which * and ? may stand")
		}
	}
	if c.Template == "" {
		c.Template = DefaultTemplate
	}
	r.fallback = r.topicTemplate(bad, "template", c.Template)
	for i, one := range c.Rules {
		field := fmt.Sprintf("rules[%d]", i)
		made := rule{aggregateType: orAny(one.AggregateType), typ: orAny(one.Type)}
		if len(one.To) == 0 {
			bad.addProblem(field+".to", "", "expected at least one topic")
		}
		for j, to := range one.To {
			at := fmt.Sprintf("%s.to[%d]", field, j)
			if slices.Contains(one.To[:j], to) {
				bad.addProblem(at, to, "the rule has this topic already")
				continue
			}
			made.to = append(made.to, r.topicTemplate(bad, at, to))
		}
		r.rules = append(r.rules, made)
		r.byType = r.byType || made.typ != "*" || slices.ContainsFunc(made.to, func(t template) bool { return t.usesAny("type") })
	}
	r.byType = r.byType || r.fallback.usesAny("type")
	if err := bad.errOrNil(); err != nil {
		return nil, err
	}
	return r, nil
}

func orAny(pattern string) string {
	if pattern == "" {
		return "*"
	}
	return pattern
}

// topicTemplate parses a template of a topic; one without placeholders is judged at once.
func (r *Router) topicTemplate(bad *InvalidError, field, text string) template {
	t, err := parseTemplate(text, "aggregatetype", "type")
	if err != nil {
		bad.addProblem(field, text, err.Error())
		return nil
	}
	if name, ok := t.staticText(); ok {
		if refusal := r.checkTopic(name); refusal != nil {
			bad.addProblem(field, text, refusal.Reason)
		}
		r.staticTopics[name] = true
	} else {
		for _, p := range t {
			if why := checkTopicCharacters(p.literal); why != "" {
				bad.addProblem(field, text, why)
				break
			}
		}
	}
	return t
}

// Route appends the targets of v to dst. The error is a [*record.Refusal]: the topic's name is not one (Malformed), it
// may not be written (NotAllowed), or the partition is none (PartitionOutOfRange; whether it is too high only the sink
// knows). On an error dst comes back as it was. Topics live as long as the Router.
func (r *Router) Route(v *event.View, dst []Target) ([]Target, error) {
	if v.Partition < record.AnyPartition {
		return dst, &record.Refusal{Class: record.PartitionOutOfRange, Reason: fmt.Sprintf("partition %d is negative", v.Partition)}
	}
	var d decision
	if v.Topic != nil {
		d = r.decideNamedTopic(v.Topic)
	} else {
		d = r.decideByRules(v)
	}
	if d.refusal != nil {
		return dst, d.refusal
	}
	at := len(dst)
	dst = append(dst, d.targets...)
	if v.Partition != record.AnyPartition {
		for i := range dst[at:] {
			dst[at+i].Partition = v.Partition
		}
	}
	return dst, nil
}

// Begin forgets which topics envelopes have named, as at the beginning of a term. Topics that exist do not count from now on.
func (r *Router) Begin(exists func(topic string) bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.exists = exists
	r.countedTopics, r.byTypeCache, r.byTopicCache = make(map[string]struct{}), make(map[string]decision), make(map[string]decision)
}

// Full reports whether envelopes have named as many topics as they may.
func (r *Router) Full() bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return len(r.countedTopics) >= r.maxTopics
}

// countTopic counts a topic that the configuration does not name in full. A service chooses such topics, so without a bound it
// could fill the memory, the metrics and the watcher document with topics that do not exist.
func (r *Router) countTopic(name string) *record.Refusal {
	if r.staticTopics[name] {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, known := r.countedTopics[name]; known || r.exists(name) {
		return nil
	}
	if len(r.countedTopics) >= r.maxTopics {
		return &record.Refusal{Class: record.NotAllowed, Reason: fmt.Sprintf(
			"topic %q would be one more than topics.max, %d: raise it, restrict topics.allow, or correct the aggregatetype", name, r.maxTopics)}
	}
	r.countedTopics[name] = struct{}{}
	return nil
}

// Narrow returns the targets for the listed topics, in their order. It judges each topic that is not among the targets:
// the list is stored on the document, where it may be older than the configuration. refused has an answer for each topic
// that may not be written.
func (r *Router) Narrow(targets []Target, topics []string) (kept []Target, refused []record.Answer) {
	for _, topic := range topics {
		if i := slices.IndexFunc(targets, func(t Target) bool { return t.Topic == topic }); i >= 0 {
			kept = append(kept, targets[i])
			continue
		}
		if d := r.decideNamedTopic([]byte(topic)); d.refusal != nil {
			refused = append(refused, record.Answer{Topic: topic, Partition: record.AnyPartition, Offset: -1, Refused: d.refusal})
		} else {
			kept = append(kept, d.targets[0])
		}
	}
	return kept, refused
}

// decideNamedTopic is the decision for a topic that the envelope names itself.
func (r *Router) decideNamedTopic(topic []byte) decision {
	r.mu.RLock()
	d, ok := r.byTopicCache[string(topic)]
	r.mu.RUnlock()
	if ok {
		return d
	}
	name := string(topic)
	d = r.decideTopics([]string{name})
	r.cacheDecision(&r.byTopicCache, name, d)
	return d
}

// decideByRules is the decision of the rules and the template.
func (r *Router) decideByRules(v *event.View) decision {
	var array [maxCachedKey]byte
	key := array[:0]
	cacheable := len(v.AggregateType)+len(v.Type) < maxCachedKey
	if cacheable {
		key = append(key, v.AggregateType...)
		if r.byType {
			key = append(append(key, 0), v.Type...)
		}
		r.mu.RLock()
		d, ok := r.byTypeCache[string(key)]
		r.mu.RUnlock()
		if ok {
			return d
		}
	}
	d := r.decideTopics(r.topicNames(v))
	if cacheable {
		r.cacheDecision(&r.byTypeCache, string(key), d)
	}
	return d
}

func (r *Router) topicNames(v *event.View) []string {
	to := []template{r.fallback}
	aggregateType, typ := string(v.AggregateType), string(v.Type)
	for _, one := range r.rules {
		if glob.Match(one.aggregateType, aggregateType) && glob.Match(one.typ, typ) {
			to = one.to
			break
		}
	}
	names := make([]string, 0, len(to))
	for _, t := range to {
		// Two templates may come out as one topic; one record per topic is what the identity of a delivery knows (N7).
		if name := string(t.appendTo(nil, v)); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

func (r *Router) decideTopics(names []string) decision {
	d := decision{targets: make([]Target, len(names))}
	for i, name := range names {
		if refusal := r.checkTopic(name); refusal != nil {
			return decision{refusal: refusal}
		}
		if refusal := r.countTopic(name); refusal != nil {
			return decision{refusal: refusal, transient: true}
		}
		d.targets[i] = Target{Topic: name, Partition: record.AnyPartition}
	}
	return d
}

func (r *Router) cacheDecision(in *map[string]decision, key string, d decision) {
	if len(key) > maxCachedKey || d.transient {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	m := *in
	if len(m) >= MaxCached {
		clear(m)
	}
	m[key] = d
}

// checkTopic says why a record may not go to the topic called name, or nil.
func (r *Router) checkTopic(name string) *record.Refusal {
	if why := checkTopicName(name); why != "" {
		return &record.Refusal{Class: record.Malformed, Reason: fmt.Sprintf("topic %.260q: %s", name, why)}
	}
	if strings.HasPrefix(name, "__") {
		return &record.Refusal{Class: record.NotAllowed, Reason: fmt.Sprintf("topic %q is internal to Kafka", name)}
	}
	if len(r.allow) == 0 || slices.ContainsFunc(r.allow, func(pattern string) bool { return glob.Match(pattern, name) }) {
		return nil
	}
	return &record.Refusal{Class: record.NotAllowed, Reason: fmt.Sprintf("topic %q matches nothing in topics.allow", name)}
}

// checkTopicName says why name is no topic for Kafka, or "".
func checkTopicName(name string) string {
	switch {
	case name == "":
		return "a topic has a name"
	case name == "." || name == "..":
		return "a topic is not called . or .."
	case len(name) > 249:
		return fmt.Sprintf("a topic's name has at most 249 characters, not %d", len(name))
	}
	return checkTopicCharacters(name)
}

func checkTopicCharacters(s string) string {
	for i := range len(s) {
		c := s[i]
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '.' && c != '_' && c != '-' {
			return "a topic's name is made of letters, digits, dot, dash and underscore"
		}
	}
	return ""
}
