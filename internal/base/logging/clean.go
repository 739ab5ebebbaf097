package logging

import "strings"

// Clean returns text without confidential parts that an error may quote. It replaces the login of every URI
// with Mask, and also the documents in MongoDB's own messages. A rejection quotes the command with its
// filters. A duplicate key error quotes the values. A failed validation quotes the inspected values.
func Clean(text string) string {
	if strings.Contains(text, "://") {
		text = userInfo.ReplaceAllString(text, "${1}"+mask+"@")
	}
	for _, q := range quotes {
		text = q.maskDocuments(text)
	}
	return text
}

// quote is the text with which a document in a message begins. The first leave bytes of it are not masked.
type quote struct {
	begin string
	leave int
}

var quotes = []quote{
	{begin: "to execute command {", leave: len("to execute command ")},
	{begin: "dup key: {", leave: len("dup key: ")},
	{begin: "{\"failingDocumentId\"", leave: 0},
	{begin: "{\"operatorName\"", leave: 0},
}

// maskDocuments replaces each document that begins with q. If a document has no end, because the text was
// shortened, maskDocuments replaces everything up to the end of the text.
func (q quote) maskDocuments(text string) string {
	from := 0
	for {
		at := strings.Index(text[from:], q.begin)
		if at < 0 {
			return text
		}

		open := from + at + q.leave
		end := closingBrace(text, open)
		text = text[:open] + mask + text[end:]
		from = open + len(mask)
	}
}

// closingBrace returns the index after the brace that closes the one at open, or the length of text if there
// is none. Braces in quoted strings do not count.
func closingBrace(text string, open int) int {
	depth, quoted := 0, false
	for i := open; i < len(text); i++ {
		char := text[i]
		if quoted && char == '\\' {
			// The next character is escaped.
			i++
			continue
		}
		if char == '"' {
			quoted = !quoted
		}
		if quoted {
			continue
		}

		switch char {
		case '{':
			depth++
		case '}':
			depth--
			if depth == 0 {
				return i + 1
			}
		}
	}
	return len(text)
}
