package envelope

import (
	"strings"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// rejectFields returns the rejection of a document with all of its faults, so that a writer does not correct one at a time. first is the
// fault at which Parse has stopped, or nil if required parts are missing.
func (m *Mapping) rejectFields(raw []byte, first error) error {
	rejected := &record.Rejection{Class: record.Malformed}
	if first != nil {
		rejected.Class = record.RejectionOf(first).Class
	}
	var reasons []string
	addFault := func(part fieldSet, reason string) {
		reasons = append(reasons, reason)
		rejected.Fields = append(rejected.Fields, contractName(part))
	}

	view := View{Raw: raw, Partition: AnyPartition, Slot: -1, Mapped: Mapped{java: m != nil && m.java}}
	var wrong fieldSet
	cursor, ok := openDocument(raw)
	for ok && cursor.next() {
		set := m.fieldsOf(&view, &cursor)
		for part := fieldSet(1); part <= set; part <<= 1 {
			if set&part == 0 {
				continue
			}
			if err := view.setField(part, &cursor); err != nil {
				wrong |= part
				addFault(part, record.RejectionOf(err).Reason)
			}
		}
	}

	missing := view.lacks(m.requiredParts()) &^ wrong
	for part := fieldSet(1); part <= missing; part <<= 1 {
		if missing&part != 0 {
			addFault(part, m.describeMissing(raw, part))
		}
	}
	rejected.Reason = strings.Join(reasons, "; ")
	return rejected
}

// fieldsOf returns the parts that are in the field at the cursor.
func (m *Mapping) fieldsOf(view *View, cursor *cursor) fieldSet {
	if m == nil {
		return fieldByName(cursor.name)
	}
	return m.partsOf(view, cursor)
}

// contractName returns the name of a part in the contract, or its key in the configuration if the contract has no field for it.
func contractName(set fieldSet) string {
	for _, p := range parts {
		if p.field == set {
			return p.configKey()
		}
	}
	if set == fDueAt {
		return "dueAt"
	}
	return "_id"
}

// describeMissing returns the reason for a required part that is missing. It names a field of the document that differs only in case and
// separators: it is usually a mistake of the writer.
func (m *Mapping) describeMissing(raw []byte, part fieldSet) string {
	stored := m.nameOf(part)
	reason := "field " + stored + " is missing or empty"
	if part == fPayload {
		reason = "field " + stored + " is missing, and null makes a tombstone"
	}

	cursor, ok := openDocument(raw)
	for ok && cursor.next() {
		found := string(clipName(cursor.name))
		if found != stored && plainName(found) == plainName(stored) {
			return reason + " (found " + found + ")"
		}
	}
	return reason
}

// NearMisses returns the fields of a document that the relay ignores although their names differ from an optional field of the contract,
// which the document lacks, only in case and separators: "dueat for dueAt". Such a document is valid.
func NearMisses(raw []byte) (misses []string) {
	var present fieldSet
	unknown := []string{}
	cursor, ok := openDocument(raw)
	for ok && cursor.next() {
		set := fieldByName(cursor.name)
		present |= set
		if set == 0 {
			unknown = append(unknown, string(clipName(cursor.name)))
		}
	}

	for _, name := range unknown {
		for _, field := range Fields() {
			if !field.Required && plainName(field.Name) == plainName(name) && present&fieldByName([]byte(field.Name)) == 0 {
				misses = append(misses, name+" for "+field.Name)
			}
		}
	}
	return misses
}

// plainName returns a name in lower case, without separators.
func plainName(name string) string {
	return strings.NewReplacer("_", "", "-", "", " ", "").Replace(strings.ToLower(name))
}
