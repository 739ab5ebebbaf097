package routing

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/outrelay/outrelay/internal/base/glob"
	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
)

// Config configures a Router.
type Config struct {
	Template string // topic if no rule matches; has placeholders. Empty: DefaultTemplate
	Rules    []Rule // the first matching rule decides
	// Choose, if not nil, is called before the rules. If it returns no topic, the rules decide. Its results
	// are cached, so it must always return the same topics for the same arguments.
	Choose func(aggregateType, typ string) []string
	Allow  []string // patterns of topics that may be written; empty allows all but Kafka's internal ones
	Max    int      // how many topics envelopes may name, in addition to the topics named in full here; 0: DefaultMax
	// Mapping reads the documents. nil: they are envelopes of the contract.
	Mapping *envelope.Mapping
}

// DefaultMax is the default of Config.Max. Each topic costs the relay about 5 kB, and a line in the
// watcher document.
const DefaultMax = 5000

// DefaultMaxCreated is the default of topics.max if the relay creates missing topics.
const DefaultMaxCreated = 500

// DefaultTemplate is the topic that Debezium's outbox routers use.
const DefaultTemplate = "outbox.event.{aggregatetype}"

// Target is a topic for an envelope, and the requested partition or [record.AnyPartition].
type Target struct {
	Topic     string
	Partition int32
}

// Problem is one error of a configuration.
type Problem struct {
	Field  string // template, rules[1].to[0], allow[2], headers.name…
	Found  string
	Reason string // the allowed values
}

// InvalidError lists all errors of a configuration.
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

// maxCached is how many decisions a Router caches. Envelopes choose the cache keys, so a full cache is
// cleared.
const maxCached = 10_000

// maxCachedKey is the maximum length of a cache key. Longer ones are not cached.
const maxCachedKey = 512

// Router chooses topics. Create it with [New].
type Router struct {
	fallback template
	rules    []rule
	choose   func(aggregateType, typ string) []string
	allow    []string
	byType   bool // decisions depend on the type as well as on the aggregatetype
	drops    bool // a rule discards envelopes
	// inputs are the other values on which decisions depend.
	inputs  []placeholder
	mapping *envelope.Mapping

	maxTopics    int
	staticTopics map[string]bool // topics that the configuration names in full; they do not count

	mu            sync.RWMutex
	existing      map[string]bool     // topics of the cluster; nil: unknown, so all topics may exist
	countedTopics map[string]struct{} // topics allowed since the last ResetTopics; at most maxTopics
	byTypeCache   map[string]decision // by aggregatetype, or by aggregatetype NUL type
	byTopicCache  map[string]decision // topics that envelopes name themselves
	discardCache  map[string]decision // whether a rule discards an envelope that names its topic; keys of byTypeCache
}

// decision is the result of Route for a cache key. Its targets have AnyPartition.
type decision struct {
	targets   []Target
	rejection *record.Rejection // of class Dropped, if a rule discards the envelope
	transient bool              // may change soon, so it is not cached
}

// New validates cfg and returns a Router. Its error is an [*InvalidError] that lists every problem.
func New(cfg Config) (*Router, error) {
	router := &Router{
		choose: cfg.Choose, allow: cfg.Allow, maxTopics: cmp.Or(cfg.Max, DefaultMax), staticTopics: make(map[string]bool), mapping: cfg.Mapping,
	}
	router.ResetTopics()
	bad := &InvalidError{}

	for i, pattern := range cfg.Allow {
		literal := strings.NewReplacer("*", "", "?", "").Replace(pattern)
		if pattern == "" || checkTopicCharacters(literal) != "" {
			bad.addProblem(fmt.Sprintf("allow[%d]", i), pattern, "expected a topic name, which may contain * and ?")
		}
	}

	if cfg.Template == "" {
		cfg.Template = DefaultTemplate
	}
	router.fallback = router.topicTemplate(bad, "template", cfg.Template)
	// A function may use the type, so its decisions are cached for each type.
	router.byType = router.byType || router.choose != nil

	for i, configured := range cfg.Rules {
		field := fmt.Sprintf("rules[%d]", i)
		parsed := rule{
			aggregateType: orAny(configured.AggregateType),
			typ:           orAny(configured.Type),
			conditions:    router.parseConditions(bad, field+".match", configured),
			drop:          configured.Drop,
		}
		switch {
		case configured.Drop && len(configured.To) > 0:
			bad.addProblem(field+".to", configured.To[0], "a rule with drop: true has no topics")
		case !configured.Drop && len(configured.To) == 0:
			bad.addProblem(field+".to", "", "expected at least one topic, or drop: true")
		}
		router.drops = router.drops || configured.Drop

		for j, to := range configured.To {
			toField := fmt.Sprintf("%s.to[%d]", field, j)
			if slices.Contains(configured.To[:j], to) {
				bad.addProblem(toField, to, "the rule has this topic already")
				continue
			}
			parsed.to = append(parsed.to, router.topicTemplate(bad, toField, to))
		}

		router.rules = append(router.rules, parsed)
		router.byType = router.byType || parsed.typ != "*"
	}

	if err := bad.errOrNil(); err != nil {
		return nil, err
	}
	return router, nil
}

func orAny(pattern string) string {
	if pattern == "" {
		return "*"
	}
	return pattern
}

// topicTemplate parses the template of a topic. It also validates the topic, as far as the placeholders
// permit.
func (r *Router) topicTemplate(bad *InvalidError, field, text string) template {
	template, err := parseTemplate(text, r.mapping, topicPlaceholders...)
	if err != nil {
		bad.addProblem(field, text, err.Error())
		return nil
	}
	// The decisions of this template depend on its placeholders, so they become part of the cache's key.
	for _, p := range template.listPlaceholders() {
		r.addInput(p)
	}

	if name, ok := template.staticText(); ok {
		if rejection := r.CheckTopic(name); rejection != nil {
			bad.addProblem(field, text, rejection.Reason)
		}
		r.staticTopics[name] = true
		return template
	}

	// The name is complete only with an envelope, but the fixed parts can be checked now.
	for _, p := range template {
		if reason := checkTopicCharacters(p.literal); reason != "" {
			bad.addProblem(field, text, reason)
			break
		}
	}
	return template
}

// Route appends the targets of view to dst. meta is the place of the envelope; with nil, {database} and {collection} are
// empty. The error is a [*record.Rejection] if the name of a topic is not valid (Malformed), a topic may not be written
// (NotAllowed), a rule discards the envelope (Dropped), or the partition is negative (PartitionOutOfRange; only the sink
// can detect that it is too high). On an error, Route returns dst unchanged. The topic names are valid as long as the
// Router.
func (r *Router) Route(view *envelope.View, meta *Meta, dst []Target) ([]Target, error) {
	if view.Partition < record.AnyPartition {
		reason := fmt.Sprintf("partition %d is negative", view.Partition)
		return dst, &record.Rejection{Class: record.PartitionOutOfRange, Reason: reason}
	}

	var decision decision
	switch {
	case view.Topic == nil:
		decision = r.decideByRules(view, meta)
	// A rule that discards an envelope applies to one that names its topic as well.
	case r.drops && r.discards(view, meta):
		decision.rejection = discarded
	default:
		decision = r.decideNamedTopic(view.Topic)
	}
	if decision.rejection != nil {
		return dst, decision.rejection
	}

	n := len(dst)
	dst = append(dst, decision.targets...)
	// The decision is shared by all envelopes of its key, so the partition is set in the copy.
	if view.Partition != record.AnyPartition {
		for i := range dst[n:] {
			dst[n+i].Partition = view.Partition
		}
	}
	return dst, nil
}

// SetExistingTopics sets the topics of the cluster, which do not count. Until they are known, no topic counts: a rejection for which the
// router only lacks a list would be a dead letter.
func (r *Router) SetExistingTopics(names map[string]bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	// Decisions that were made without a list have counted nothing.
	if r.existing == nil {
		clear(r.byTypeCache)
		clear(r.byTopicCache)
	}
	r.existing = names
}

// KnowsTopics reports whether SetExistingTopics was called.
func (r *Router) KnowsTopics() bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.existing != nil
}

// ResetTopics forgets which topics envelopes have named. It is called when an ownership begins.
func (r *Router) ResetTopics() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.countedTopics = make(map[string]struct{})
	r.byTypeCache = make(map[string]decision)
	r.byTopicCache = make(map[string]decision)
	r.discardCache = make(map[string]decision)
}

// NeedsTopics reports whether SetExistingTopics changes decisions: the topics are unknown, or envelopes have named the maximum number.
func (r *Router) NeedsTopics() bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.existing == nil || len(r.countedTopics) >= r.maxTopics
}

// countTopic counts a topic that the configuration does not name in full. It returns a rejection if there
// are too many. Services choose such topics. Without a limit, a service could fill the memory, the metrics
// and the watcher document with topics that do not exist.
func (r *Router) countTopic(name string) *record.Rejection {
	if r.staticTopics[name] {
		return nil
	}

	r.mu.Lock()
	defer r.mu.Unlock()
	// Only topics that do not exist yet can be the mistake of a service.
	if _, counted := r.countedTopics[name]; counted || r.existing == nil || r.existing[name] {
		return nil
	}
	if len(r.countedTopics) >= r.maxTopics {
		return &record.Rejection{Class: record.NotAllowed, Reason: fmt.Sprintf("topic %q would exceed topics.max=%d: "+
			"raise it, restrict topics.allow, or correct the aggregatetype", name, r.maxTopics)}
	}
	r.countedTopics[name] = struct{}{}
	return nil
}

// RestrictTo returns the targets for the listed topics, in their order. The list is stored on the document: it may be older than the
// configuration, or an operator has chosen it. So RestrictTo validates each topic that is not among the targets, and returns a result
// in rejected for each topic that may not be written.
func (r *Router) RestrictTo(targets []Target, topics []string) (kept []Target, rejected []record.Result) {
	for _, topic := range topics {
		i := slices.IndexFunc(targets, func(target Target) bool { return target.Topic == topic })
		if i >= 0 {
			kept = append(kept, targets[i])
			continue
		}

		decision := r.decideNamedTopic([]byte(topic))
		if decision.rejection != nil {
			rejected = append(rejected, record.Result{
				Topic: topic, Partition: record.AnyPartition, Offset: -1, Rejection: decision.rejection,
			})
			continue
		}
		kept = append(kept, decision.targets[0])
	}
	return kept, rejected
}

// decideNamedTopic returns the decision for a topic that the envelope names itself.
func (r *Router) decideNamedTopic(topic []byte) decision {
	r.mu.RLock()
	decision, ok := r.byTopicCache[string(topic)]
	r.mu.RUnlock()
	if ok {
		return decision
	}

	// topic aliases the document, and the cache needs a text of its own.
	name := string(topic)
	decision = r.decideTopics([]string{name})
	r.cacheDecision(&r.byTopicCache, name, decision)
	return decision
}

// decideByRules returns the decision of the rules and the template.
func (r *Router) decideByRules(view *envelope.View, meta *Meta) decision {
	return r.decideCached(&r.byTypeCache, (*Router).decideFromRules, view, meta)
}

// decideFromRules is decideByRules without the cache.
func (r *Router) decideFromRules(view *envelope.View, meta *Meta) decision {
	names, rejection := r.topicNames(view, meta)
	if rejection != nil {
		return decision{rejection: rejection}
	}
	return r.decideTopics(names)
}

// decideCached returns the decision in cache for the values on which the rules depend, or the result of decide, which it caches. It takes
// a pointer, because ResetTopics replaces the caches.
func (r *Router) decideCached(
	cache *map[string]decision, decide func(*Router, *envelope.View, *Meta) decision, view *envelope.View, meta *Meta,
) decision {
	// The key is built on the stack, so that a cached decision costs no allocation.
	var array [maxCachedKey]byte
	key, cacheable := r.appendCacheKey(array[:0], view, meta)
	if !cacheable {
		return decide(r, view, meta)
	}

	r.mu.RLock()
	decision, ok := (*cache)[string(key)]
	r.mu.RUnlock()
	if !ok {
		decision = decide(r, view, meta)
		r.cacheDecision(cache, string(key), decision)
	}
	return decision
}

// appendCacheKey appends the values to key on which the rules depend. The first NUL ends the aggregatetype. It returns false if the
// decision cannot be cached.
func (r *Router) appendCacheKey(key []byte, view *envelope.View, meta *Meta) (_ []byte, ok bool) {
	if len(view.AggregateType)+len(view.Type) >= maxCachedKey || bytes.IndexByte(view.AggregateType, 0) >= 0 {
		return key, false
	}
	key = append(key, view.AggregateType...)
	if r.byType {
		key = append(append(key, 0), view.Type...)
	}
	if len(r.inputs) == 0 {
		return key, true
	}
	return r.appendInputs(key, view, meta)
}

// removeRepetitions returns names without repetitions, in their order: the identity of a delivery has one record per
// topic (N7).
func removeRepetitions(names []string) []string {
	out := make([]string, 0, len(names))
	for _, name := range names {
		if !slices.Contains(out, name) {
			out = append(out, name)
		}
	}
	return out
}

// decideTopics returns the targets for the named topics, or the rejection of the first one that may not be
// written.
func (r *Router) decideTopics(names []string) decision {
	decided := decision{targets: make([]Target, len(names))}
	for i, name := range names {
		if rejection := r.CheckTopic(name); rejection != nil {
			return decision{rejection: rejection}
		}
		if rejection := r.countTopic(name); rejection != nil {
			// The topic may be created, or counted topics reset, so the next envelope is decided again.
			return decision{rejection: rejection, transient: true}
		}
		decided.targets[i] = Target{Topic: name, Partition: record.AnyPartition}
	}
	return decided
}

// cacheDecision stores decision in the cache. It takes a pointer, because ResetTopics replaces the caches.
func (r *Router) cacheDecision(cache *map[string]decision, key string, decision decision) {
	if len(key) > maxCachedKey || decision.transient {
		return
	}

	r.mu.Lock()
	defer r.mu.Unlock()
	cached := *cache
	// Remembering which entries were used last would cost more at each lookup than filling the cache again.
	if len(cached) >= maxCached {
		clear(cached)
	}
	cached[key] = decision
}

// CheckTopic returns why a record may not go to the topic, or nil.
func (r *Router) CheckTopic(name string) *record.Rejection { return CheckTopic(name, r.allow) }

// CheckTopic returns why a record may not go to the topic, or nil: Kafka rejects its name, it belongs to Kafka, or none of the patterns of
// allow matches it. Without a pattern, every topic is allowed.
func CheckTopic(name string, allow []string) *record.Rejection {
	if reason := checkTopicName(name); reason != "" {
		return &record.Rejection{Class: record.Malformed, Reason: fmt.Sprintf("topic %.260q: %s", name, reason)}
	}
	if strings.HasPrefix(name, "__") {
		return &record.Rejection{Class: record.NotAllowed, Reason: fmt.Sprintf("topic %q is internal to Kafka", name)}
	}

	matches := func(pattern string) bool { return glob.Match(pattern, name) }
	if len(allow) == 0 || slices.ContainsFunc(allow, matches) {
		return nil
	}
	return &record.Rejection{Class: record.NotAllowed, Reason: fmt.Sprintf("topic %q matches nothing in topics.allow", name)}
}

// checkTopicName returns why name is not a valid topic name for Kafka, or "".
func checkTopicName(name string) string {
	switch {
	case name == "":
		return "the name is empty"
	case name == "." || name == "..":
		return "a topic name cannot be . or .."
	case len(name) > 249:
		return fmt.Sprintf("a topic name has at most 249 characters, not %d", len(name))
	}
	return checkTopicCharacters(name)
}

func checkTopicCharacters(topic string) string {
	for i := range len(topic) {
		char := topic[i]
		isLetter := char >= 'a' && char <= 'z' || char >= 'A' && char <= 'Z'
		isDigit := char >= '0' && char <= '9'
		if !isLetter && !isDigit && char != '.' && char != '_' && char != '-' {
			return "a topic name may contain only letters, digits, dots, dashes and underscores"
		}
	}
	return ""
}
