package envelope

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// Names are the fields of a document that hold the parts of its envelope. An empty name is the name in the contract,
// see [Fields]. The contract has no field for Timestamp.
type Names struct {
	ID            string // the header id; the relay itself identifies a document by _id
	AggregateType string
	AggregateID   string
	Key           string // or WholeDocument: the key of the document, as JSON
	Type          string
	Payload       string // or WholeDocument
	Timestamp     string // the timestamp of the record
	Topic         string
	Partition     string
	Headers       string
	ContentType   string
	SchemaVersion string
	Source        string
	Subject       string
	Time          string
	ExpiresAt     string
}

const (
	// NoField as a name means that the documents do not have this part.
	NoField = "-"
	// WholeDocument as the name of the payload makes the whole document the payload. As the name of the key, it makes
	// {"_id": …} the key.
	WholeDocument = "*"
)

// part describes a part of an envelope that a mapping can rename.
type part struct {
	field    fieldSet
	contract string // its name in the contract; "" if the contract has no field for it
	name     func(*Names) *string
	required bool
}

var parts = []part{
	{fEventID, "", func(n *Names) *string { return &n.ID }, true},
	{fAggregateType, "aggregatetype", func(n *Names) *string { return &n.AggregateType }, true},
	{fAggregateID, "aggregateid", func(n *Names) *string { return &n.AggregateID }, true},
	{fKey, "key", func(n *Names) *string { return &n.Key }, false},
	{fType, "type", func(n *Names) *string { return &n.Type }, true},
	{fPayload, "payload", func(n *Names) *string { return &n.Payload }, true},
	{fTimestamp, "", func(n *Names) *string { return &n.Timestamp }, false},
	{fTopic, "topic", func(n *Names) *string { return &n.Topic }, false},
	{fPartition, "partition", func(n *Names) *string { return &n.Partition }, false},
	{fHeaders, "headers", func(n *Names) *string { return &n.Headers }, false},
	{fContentType, "contenttype", func(n *Names) *string { return &n.ContentType }, false},
	{fSchemaVersion, "schemaversion", func(n *Names) *string { return &n.SchemaVersion }, false},
	{fSource, "source", func(n *Names) *string { return &n.Source }, false},
	{fSubject, "subject", func(n *Names) *string { return &n.Subject }, false},
	{fTime, "time", func(n *Names) *string { return &n.Time }, false},
	{fExpiresAt, "expiresAt", func(n *Names) *string { return &n.ExpiresAt }, false},
}

// configKey returns the key of the part in the configuration.
func (p part) configKey() string {
	switch p.field {
	case fEventID:
		return "id"
	case fTimestamp:
		return "timestamp"
	case fExpiresAt:
		return "expires_at"
	}
	return p.contract
}

// relayWritten are the fields with a meaning for the relay, or that it writes to the document of an envelope that was
// recorded as sent. They have the same names in every document, because queries and indexes use them.
var relayWritten = append(slices.Clip(relayMarks), "dueAt", "ts", "slot")

// relayMarks are the fields of relayWritten that only the relay writes.
var relayMarks = []string{"sent", "sentAt", "scheduledFor"}

// Mapping reads envelopes from documents whose fields have other names. It is compiled once, immutable, and safe for
// concurrent use. A nil Mapping reads the documents of the contract.
type Mapping struct {
	names    Names // complete
	byName   map[string]fieldSet
	required fieldSet
	whole    bool // the payload is the whole document
	docKey   bool // the key is the key of the document
	java     bool // see Names.Java
}

// MappingProblem is one reason why a mapping is impossible.
type MappingProblem struct {
	Key    string // of the configuration, such as aggregatetype
	Found  string
	Reason string
}

// NewMapping compiles the names. It returns nil if the names are the contract's, and all problems
// otherwise.
//
// With java, the mapping accepts the documents that Debezium's event router accepts. The type may be missing. Keys and payloads
// may be of any type but UUIDs of other subtypes, and have the text that Java gives them.
func NewMapping(n Names, java bool) (*Mapping, []MappingProblem) {
	if n == (Names{}) && !java {
		return nil, nil
	}

	mapping := &Mapping{byName: make(map[string]fieldSet), java: java}
	var problems []MappingProblem
	for _, p := range parts {
		name := *p.name(&n)
		if reason := p.checkName(name); reason != "" {
			problems = append(problems, MappingProblem{p.configKey(), name, reason})
			continue
		}
		mapping.addPart(p, name)
	}
	if problems != nil {
		return nil, problems
	}

	// The fields of the relay, and the fields with a fixed name. `_id` identifies the document.
	for _, name := range append([]string{"_id"}, relayWritten...) {
		mapping.byName[name] |= fieldByName([]byte(name))
	}
	// Configured names that equal the contract's need no mapping: the table is faster.
	if mapping.isContract() {
		return nil, nil
	}
	return mapping, nil
}

// addPart adds a valid part.
func (m *Mapping) addPart(part part, name string) {
	isDefault := name == ""
	if isDefault {
		name = part.contract
	}
	// By default `_id` is also the id of the event.
	if part.field == fEventID && (isDefault || name == "_id") {
		return
	}
	*part.name(&m.names) = name

	switch {
	case name == "" || name == NoField:
		return
	case name == WholeDocument && part.field == fPayload:
		m.whole = true
		return
	case name == WholeDocument:
		m.docKey = true
		return
	}
	// Several parts may be in one field, such as the key and the aggregate's id.
	m.byName[name] |= part.field
	if part.required && !(m.java && part.field == fType) {
		m.required |= part.field
	}
}

// checkName returns why the documents cannot have the part in the field, or "".
func (p part) checkName(name string) string {
	switch {
	case name == "":
		return ""
	case name == NoField && (p.field == fEventID || p.field == fPayload):
		return "every envelope needs this part; name its field"
	case name == NoField:
		return ""
	case name == WholeDocument:
		if p.field == fPayload || p.field == fKey {
			return ""
		}
		return "only payload and key can be the whole document"
	case strings.HasPrefix(name, "$") || strings.ContainsAny(name, ".\x00"):
		return "expected a field at the top level of the document, without $ and dots"
	case slices.Contains(relayWritten, name):
		return "the field " + name + " has a meaning for the relay; use another field"
	}
	return ""
}

// isContract reports whether the mapping is the same as none.
func (m *Mapping) isContract() bool {
	for _, p := range parts {
		if *p.name(&m.names) != p.contract {
			return false
		}
	}
	return !m.java
}

// Has reports whether the documents have the part with this name in the contract.
func (m *Mapping) Has(contract string) bool { return m.Name(contract) != "" }

// Name returns the field that holds the part with this name in the contract. It returns "" if the documents have no such
// field. A name that cannot be mapped is returned unchanged.
func (m *Mapping) Name(contract string) string {
	if m == nil {
		return contract
	}

	for _, p := range parts {
		if p.contract != contract {
			continue
		}
		name := *p.name(&m.names)
		if name == NoField || name == WholeDocument {
			return ""
		}
		return name
	}
	return contract
}

// Whole reports whether the payload is the whole document.
func (m *Mapping) Whole() bool { return m != nil && m.whole }

// RenamesID reports whether a record has another id than its document.
func (m *Mapping) RenamesID() bool { return m != nil && m.names.ID != "" }

// Ref returns the expression for the value of a part, which is null if the documents do not have it.
func (m *Mapping) Ref(contract string) string { return "$" + cmp.Or(m.Name(contract), contract) }

// Select returns a projection with the fields of these parts and with the ids.
func (m *Mapping) Select(contract ...string) bson.D {
	selected := bson.D{{Key: "_id", Value: 1}}
	if m.RenamesID() {
		selected = append(selected, bson.E{Key: m.names.ID, Value: 1})
	}
	for _, c := range contract {
		name := m.Name(c)
		if name != "" && !slices.ContainsFunc(selected, func(element bson.E) bool { return element.Key == name }) {
			selected = append(selected, bson.E{Key: name, Value: 1})
		}
	}
	return selected
}

// Without returns a projection without the fields of these parts. It is empty if the documents have none of them.
func (m *Mapping) Without(contract ...string) bson.D {
	out := bson.D{}
	for _, c := range contract {
		if name := m.Name(c); name != "" {
			out = append(out, bson.E{Key: name, Value: 0})
		}
	}
	return out
}

// KeyFilter returns the condition for envelopes whose ordering key is among values, a list.
func (m *Mapping) KeyFilter(values any) bson.E {
	in := bson.D{{Key: "$in", Value: values}}
	or := bson.A{}
	key, aggregate := m.Name("key"), m.Name("aggregateid")
	if key != "" {
		or = append(or, bson.D{{Key: key, Value: in}})
	}

	// Without an aggregate, the id is the ordering key, as derive sets it.
	if aggregate == "" {
		aggregate = "_id"
	}
	if key == "" {
		or = append(or, bson.D{{Key: aggregate, Value: in}})
	} else {
		// An empty key counts as missing, as in setString.
		noKey := bson.D{{Key: "$in", Value: bson.A{nil, ""}}}
		or = append(or, bson.D{{Key: key, Value: noKey}, {Key: aggregate, Value: in}})
	}
	return bson.E{Key: "$or", Value: or}
}

// partsOf returns the parts that the field at cursor holds, or 0 if it holds none.
func (m *Mapping) partsOf(view *View, cursor *cursor) fieldSet {
	if m.whole {
		view.noteForeign(cursor)
	}
	return m.byName[string(cursor.name)]
}

// nameOf returns the name of the field that holds a part, for an error message.
func (m *Mapping) nameOf(set fieldSet) string {
	for _, p := range parts {
		if p.field != set {
			continue
		}
		if m != nil {
			return *p.name(&m.names)
		}
		return p.contract
	}
	return "_id"
}

// String returns the names that differ from the contract, for logs.
func (m *Mapping) String() string {
	if m == nil {
		return "contract"
	}
	var list []string
	for _, p := range parts {
		if name := *p.name(&m.names); name != p.contract {
			list = append(list, fmt.Sprintf("%s=%s", p.configKey(), name))
		}
	}
	return strings.Join(list, " ")
}

// Project returns a projection of parts, and of fields that cannot be mapped, under their names in the contract.
func (m *Mapping) Project(contract ...string) bson.D {
	projected := bson.D{}
	for _, c := range contract {
		switch name := m.Name(c); name {
		case c:
			projected = append(projected, bson.E{Key: c, Value: 1})
		case "":
		default:
			projected = append(projected, bson.E{Key: c, Value: "$" + name})
		}
	}
	return projected
}

// ToContract returns the document with the field names of the contract. It leaves out the fields that hold no part of
// the envelope. raw is returned unchanged if it is broken, or if the mapping is nil.
func (m *Mapping) ToContract(raw bson.Raw) bson.Raw {
	elems, err := raw.Elements()
	if m == nil || err != nil {
		return raw
	}

	doc := make(bson.D, 0, len(elems))
	for _, e := range elems {
		name := e.Key()
		if name == "_id" || slices.Contains(relayWritten, name) {
			doc = append(doc, bson.E{Key: name, Value: e.Value()})
		}
		for _, p := range parts {
			if p.contract != "" && p.contract != name && *p.name(&m.names) == name {
				doc = append(doc, bson.E{Key: p.contract, Value: e.Value()})
			}
		}
		// This part is stored under its own name: either the mapping leaves it unchanged, or it cannot be mapped, such
		// as ts.
		if m.Name(name) == name && fieldByName([]byte(name))&^fID != 0 && !slices.Contains(relayWritten, name) {
			doc = append(doc, bson.E{Key: name, Value: e.Value()})
		}
	}
	renamed, err := bson.Marshal(doc)
	if err != nil {
		return raw
	}
	return renamed
}
