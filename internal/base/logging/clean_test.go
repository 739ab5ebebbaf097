package logging

import "testing"

func TestCleanCutsDocuments(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"plain": "plain",
		`(Unauthorized) not authorized on shop to execute command { find: "outbox", filter: { key: "customer }{ 17", a: { b: "x\"}" } } }; grant find`: "(Unauthorized) not authorized on shop to execute command ***; grant find",
		`E11000 duplicate key error collection: shop.c index: k_1 dup key: { k: "customer-17" }`:                                                       "E11000 duplicate key error collection: shop.c index: k_1 dup key: ***",
		`Document failed validation: {"failingDocumentId": "1","details": {"consideredValue": "payload"}}, and more`:                                   "Document failed validation: ***, and more",
		`to execute command { insert: "o", shortened at some pl`:                                                                                       "to execute command ***",
		"dup key: { a: 1 } and dup key: { b: 2 }":                                                                                                      "dup key: *** and dup key: ***",
		"mongodb://u:p@h/ to execute command {}":                                                                                                       "mongodb://***@h/ to execute command ***",
	} {
		if got := Clean(in); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
