package engine

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// What RabbitMQ 4.3.6 says of such messages; integration/differ asks it.
func TestFormOfMessages(t *testing.T) {
	for message, problem := range map[string]string{
		"":                                 "",
		"A":                                "{not_a_message_section,{position,0}}",
		"\x00Su":                           "{invalid_section_value,binary,{position,3}}",
		"\x00SuA":                          "{invalid_section_value,binary,{position,3}}",
		"\x00Su\xa0\x05a":                  "{invalid_section_value,binary,{position,3}}",
		"\x00Su\xb0\xff\xff\xff\xffa":      "{invalid_section_value,binary,{position,3}}",
		"\x00Su\xa0\x01a":                  "",
		"\x00Su\xa0\x01a\x00Su\xa0\x01b":   "",
		"\x00Su\xa0\x01a\x00Su":            "{invalid_section_value,binary,{position,9}}",
		"\x00Su\xa0\x01aX":                 "{not_a_message_section,{position,6}}",
		"\x00Sv":                           "{invalid_section_value,list,{position,3}}",
		"\x00Sw":                           "{insufficient_input,peek_value_size}",
		"\x00Sw\xa1\x05a":                  "{invalid_section_value,any,{position,3}}",
		"\x00Sw\xff":                       "{primitive_type_unsupported,255,peek_value_size}",
		"\x00Sx\xc1\x01\x00":               "{unexpected_message_section,footer,{position,0}}",
		"\x00Sz\x45\x00Sw\x40":             "{unexpected_message_section,122,{position,0}}",
		"\x00Sq":                           "{invalid_section_value,map,{position,3}}",
		"\x00St\x45\x00Sw\x40":             "{invalid_section_value,map,{position,3}}",
		"\x00Ss\x40\x00Sw\x40":             "{invalid_section_value,list,{position,3}}",
		"\x00SpE\x00SpE\x00Sw\x40":         "{unexpected_message_section,header,{position,4}}",
		"\x00Sr\xc1\x01\x00\x00Su\xa0\x00": "",
	} {
		assert.Equal(t, problem, illFormed([]byte(message)), "%q", message)
	}
}

// RabbitMQ looks no deeper than it has to.
func TestFormOfNestedValues(t *testing.T) {
	nested := strings.Repeat("\x00S\x01", 1_000_000)
	assert.Empty(t, illFormed([]byte("\x00Sw"+nested+"@")))
	assert.Contains(t, illFormed([]byte("\x00Sw"+nested)), "insufficient_input")
	assert.Empty(t, illFormed([]byte("\x00Sw\x00"+nested+"@@")), "a descriptor that is described")
}
