"""The parser and the control-flow graph on hand-written disassembly."""

from __future__ import annotations

from optkit.verify import cfg, sass

TEXT = """
	.section	.text.k,"ax",@progbits
k:
.text.k:
	//## File "/a/inner.py", line 7 inlined at "/a/outer.py", line 40
	//## File "/a/outer.py", line 40
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   BSSY B0, `(.L_x_2) ;
        /*0020*/              @!P0 BRA `(.L_x_1) ;
.L_x_0:
	//## File "/a/inner.py", line 9
        /*0030*/                   LDG.E.STRONG.GPU R0, desc[UR6][R2.64] ;
        /*0040*/               @P1 BRA `(.L_x_0) ;
.L_x_1:
        /*0050*/                   BSYNC B0 ;
.L_x_2:
        /*0060*/                   BRA !P2, `(.L_x_4) ;
        /*0070*/                   BRX R4 -0x80 (*"BRANCH_TARGETS .L_x_3,.L_x_4"*);
.L_x_3:
        /*0080*/                   NOP;
        /*0090*/                   EXIT ;
.L_x_4:
        /*00a0*/               @P3 EXIT ;
        /*00b0*/                   BRA.DIV UR4, `(.L_x_3) ;
        /*00c0*/                   EXIT ;
"""


def test_instructions_labels_and_frames() -> None:
    (f,) = sass.parse(TEXT)
    assert (f.name, len(f.code)) == ("k", 13)
    assert f.code[0].frames == (("/a/inner.py", 7), ("/a/outer.py", 40))
    assert f.code[3].frames == f.code[4].frames == (("/a/inner.py", 9),)
    assert f.code[3].parts == ("LDG", "E", "STRONG", "GPU")
    assert (f.code[2].predicate, f.code[2].labels) == ("@!P0", (".L_x_1",))
    assert f.code[7].labels == (".L_x_3", ".L_x_4")
    assert str(f.code[4]) == "/*0040*/ @P1 BRA `(.L_x_0)"


def test_edges_loops_and_reach() -> None:
    (f,) = sass.parse(TEXT)
    g = cfg.build(f)
    at = {f.code[s].offset: b for b, (s, _) in enumerate(g.blocks)}
    edges = {(f.code[g.blocks[b][0]].offset, f.code[g.blocks[s][0]].offset) for b, ss in enumerate(g.succ) for s in ss}
    assert edges == {
        (0x00, 0x30),
        (0x00, 0x50),
        (0x30, 0x30),
        (0x30, 0x50),
        (0x50, 0x60),
        (0x60, 0x70),
        (0x60, 0xA0),
        (0x70, 0x80),
        (0x70, 0xA0),
        (0xA0, 0xB0),
        (0xB0, 0x80),
        (0xB0, 0xC0),
    }
    assert g.loops() == [frozenset({at[0x30]})]
    assert at[0x80] not in g.reach(0, stop=frozenset({at[0x60]}))
    assert g.reach(0, cut=frozenset({(at[0x00], at[0x50]), (at[0x30], at[0x50])})) == {at[0x00], at[0x30]}
